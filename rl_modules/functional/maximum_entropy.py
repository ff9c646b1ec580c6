"""Maximum-entropy reinforcement learning: the target and the policy density of Soft Actor-Critic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    require_number,
    require_same_shape,
    require_shape,
    require_tensors,
)

_LOG_2 = math.log(2.0)
_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def soft_q_target(
    reward: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: float | Tensor,
    gamma: float | Tensor,
) -> Tensor:
    """The target of a soft Q-function, which includes the policy's entropy as reward.

    y = r + γ (1 - terminated) (Q(s', a') - α log π(a'|s')),   a' ~ π(·|s')

    Args:
        reward: r, shape (B,), in units of reward; with n-step targets the discounted sum of n rewards.
        terminated: true where s' is terminal, shape (B,). A truncated transition bootstraps, so it is False there.
        next_q: Q(s', a') of the target networks (the smaller of two in SAC), shape (B,), in units of reward.
        next_log_prob: log π(a'|s') in nats, shape (B,).
        alpha: α, the entropy's weight in units of reward per nat, at least 0: a number or a scalar tensor.
        gamma: the discount of s', in [0, 1]: γ, or γ**n for n steps, or a tensor of shape (B,) where n varies.

    Returns:
        y, shape (B,), in units of reward, detached.

    Raises:
        ValueError: shapes do not fit, alpha is a negative number, or gamma is a number outside [0, 1].

    Source: Haarnoja et al. 2018, arXiv:1812.05905, eqs. 2 and 3.
    """
    require_tensors(reward=reward)
    for name, tensor in (("terminated", terminated), ("next_q", next_q), ("next_log_prob", next_log_prob)):
        require_shape(name, tensor, reward.shape, "reward")
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1:
            raise ValueError(f"alpha has shape {tuple(alpha.shape)}, expected one number.")
        alpha = as_constant(alpha).reshape(())
    else:
        require_number("alpha", alpha)
    if isinstance(gamma, Tensor):
        require_same_shape(reward=reward, gamma=gamma)
        gamma = as_constant(gamma)
    else:
        require_number("gamma", gamma, 0.0, 1.0)
    soft_value = as_constant(next_q) - alpha * as_constant(next_log_prob)
    return as_constant(reward) + gamma * torch.where(terminated.bool(), 0.0, soft_value)


def soft_value(q: Tensor, log_prob: Tensor, alpha: float | Tensor) -> Tensor:
    """The soft value of a state from the values of its actions.

    V(s) = Σ_a π(a|s) (Q(s, a) - α log π(a|s))

    Args:
        q: Q(s, ·), shape (B, A), in units of reward.
        log_prob: log π(·|s) in nats, shape (B, A). Receives gradient.
        alpha: α, the entropy's weight in units of reward per nat: a number or a scalar tensor.

    Returns:
        V, shape (B,), in units of reward. Of all policies softmax(Q / α) has the largest, α log Σ_a exp(Q(s, a) / α).

    Raises:
        ValueError: shapes differ.

    Source: Christodoulou 2019, arXiv:1910.07207, eq. 10; its negative is the policy's loss, eq. 12.
    """
    require_same_shape(q=q, log_prob=log_prob)
    log_prob = as_float(log_prob)
    return (log_prob.exp() * (as_float(q) - alpha * log_prob)).sum(-1)


def squashed_gaussian_log_prob(mean: Tensor, log_std: Tensor, pre_tanh: Tensor) -> Tensor:
    """The log-density of an action a = tanh(u) with u from a diagonal Gaussian, computed from u.

    log π(a) = Σ_i [ log N(u_i; μ_i, σ_i) - log(1 - tanh²(u_i)) ]
    log(1 - tanh²(u)) = 2 (log 2 - |u| - log(1 + e^{-2|u|}))

    The second line stays exact where tanh(u) rounds to 1, and 1 - tanh²(u) to 0.

    Args:
        mean: μ, shape (..., A), without unit.
        log_std: log σ, shape (..., A).
        pre_tanh: u, the action before tanh, shape (..., A). Receives gradient, as do mean and log_std: with
            u = μ + σ ε the result is differentiable by the reparameterised sample.

    Returns:
        log π(a), shape (...), in nats, with respect to actions in (-1, 1): the sum over the last dimension.

    Raises:
        ValueError: shapes differ, or there is no dimension to sum over.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, appendix C; the identity is that of TensorFlow Probability's
        ``Tanh`` bijector, made symmetric.
    """
    require_tensors(mean=mean)
    if mean.ndim == 0:
        raise ValueError("mean has shape (), expected at least one dimension [..., A].")
    require_same_shape(mean=mean, log_std=log_std, pre_tanh=pre_tanh)
    mean, log_std, pre_tanh = as_float(mean), as_float(log_std), as_float(pre_tanh)
    gaussian = -0.5 * ((pre_tanh - mean) * (-log_std).exp()).square() - log_std - _HALF_LOG_2_PI
    size = pre_tanh.abs()
    log_slope = 2 * (_LOG_2 - size - torch.log1p((-2 * size).exp()))
    return (gaussian - log_slope).sum(-1)
