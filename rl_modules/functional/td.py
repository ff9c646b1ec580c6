"""Temporal differences: targets of replayed transitions, and the loss to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    require_choice,
    require_ndim,
    require_number,
    require_same_shape,
    require_shape,
    require_tensors,
)


def n_step_rewards(reward: Tensor, n_steps: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The parts of a replayed transition's n-step target that the value function does not change.

    R = Σ_{k<n} γ^k r_k,    discount = γ^n,    target = R + discount (1 - terminated) V(s_{t+n})

    Args:
        reward: r_t … r_{t+K-1}, shape (M, K), in units of reward; 0 from the n-th on.
        n_steps: n, how many rewards count, integers in [1, K], shape (M,).
        gamma: discount γ per step, in [0, 1].

    Returns:
        R in units of reward and γ^n, shape (M,) each, detached.

    Raises:
        ValueError: shapes differ, or gamma is outside [0, 1].

    Source: Sutton & Barto 2018, eq. 7.1; in replay: Hessel et al. 2018, arXiv:1710.02298.
    """
    require_tensors(reward=reward, n_steps=n_steps)
    require_ndim("reward", reward, 2, "[M, K]")
    require_shape("n_steps", n_steps, reward.shape[:1], "reward's transitions")
    require_number("gamma", gamma, 0.0, 1.0)
    reward = as_constant(reward)
    if reward.shape[1] == 1:
        return reward[:, 0], torch.full_like(reward[:, 0], gamma)
    powers = torch.pow(gamma, torch.arange(reward.shape[1], dtype=reward.dtype, device=reward.device))
    return (reward * powers).sum(1), torch.pow(gamma, n_steps.to(reward.dtype))


def dqn_target(
    reward: Tensor,
    terminated: Tensor,
    next_q_target: Tensor,
    gamma: float | Tensor,
    next_q_online: Tensor | None = None,
) -> Tensor:
    """The target of Q-learning with a target network; of Double DQN if ``next_q_online`` is given.

    y = r + γ (1 - terminated) max_a Q_target(s', a)                       DQN
    y = r + γ (1 - terminated) Q_target(s', argmax_a Q_online(s', a))      Double DQN

    Args:
        reward: r, shape (B,), in units of reward; with n-step targets the discounted sum of n rewards.
        terminated: true where s' is terminal, shape (B,). A truncated transition bootstraps, so it is False there.
        next_q_target: Q_target(s', ·), shape (B, A), in units of reward.
        gamma: the discount of s', in [0, 1]: γ, or γ**n for n steps, or a tensor of shape (B,) where n varies.
        next_q_online: Q_online(s', ·), shape (B, A), in units of reward.

    Returns:
        y, shape (B,), in units of reward, detached.

    Raises:
        ValueError: shapes do not fit, or gamma is a number outside [0, 1].

    Source: Mnih et al. 2015 (Nature 518), algorithm 1; van Hasselt et al. 2016, arXiv:1509.06461, eq. 4.
    """
    require_same_shape(reward=reward, terminated=terminated)
    require_tensors(next_q_target=next_q_target)
    if next_q_target.shape[:-1] != reward.shape or next_q_target.ndim != reward.ndim + 1:
        raise ValueError(
            f"next_q_target has shape {tuple(next_q_target.shape)}, expected that of reward, {tuple(reward.shape)}, "
            "and a last dimension of actions."
        )
    if isinstance(gamma, Tensor):
        require_same_shape(reward=reward, gamma=gamma)
        gamma = gamma.detach()
    else:
        require_number("gamma", gamma, 0.0, 1.0)
    next_q_target = as_constant(next_q_target)
    if next_q_online is None:
        next_value = next_q_target.amax(-1)
    else:
        require_same_shape(next_q_target=next_q_target, next_q_online=next_q_online)
        best = next_q_online.detach().argmax(-1, keepdim=True)
        next_value = next_q_target.gather(-1, best).squeeze(-1)
    return as_constant(reward) + gamma * torch.where(terminated.bool(), 0.0, next_value)


def td_loss(prediction: Tensor, target: Tensor, loss: str = "mse", weight: Tensor | None = None) -> Tensor:
    """The loss of a temporal-difference error, optionally weighted per transition.

    L = mean_i w_i (Q_i - y_i)²                                          "mse"
    L = mean_i w_i (½ d_i² if |d_i| < 1 else |d_i| - ½),  d = Q - y      "huber"

    Args:
        prediction: Q(s, a) in units of reward, any shape S. The only input that receives gradient.
        target: y in units of reward, shape S.
        loss: "mse", or "huber", whose gradient is bounded by 1.
        weight: w, a plain factor such as prioritised replay's importance weights, shape S.

    Returns:
        Scalar to minimise. The mean is over all elements: weights are not normalised.

    Raises:
        ValueError: shapes differ, or loss is neither of the two words.

    Source: Mnih et al. 2015 (Nature 518), error clipping in its Methods; weights: Schaul et al. 2016, arXiv:1511.05952.
    """
    require_choice("loss", loss, ("mse", "huber"))
    require_same_shape(prediction=prediction, target=target)
    reduction = "mean" if weight is None else "none"
    prediction, target = as_float(prediction), as_constant(target)
    dtype = torch.promote_types(prediction.dtype, target.dtype)  # torch 2.6 has no gradient of mixed ones
    prediction, target = prediction.to(dtype), target.to(dtype)
    if loss == "mse":
        error = F.mse_loss(prediction, target, reduction=reduction)
    else:
        error = F.smooth_l1_loss(prediction, target, reduction=reduction)
    if weight is None:
        return error
    require_same_shape(prediction=prediction, weight=weight)
    return (as_constant(weight) * error).mean()
