"""Value losses and targets: how a critic, or a Q-network, learns what a state is worth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    mean_of,
    require_choice,
    require_number,
    require_same_shape,
    require_tensors,
)


def value_loss(
    value: Tensor,
    returns: Tensor,
    old_value: Tensor | None = None,
    clip_range: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Half the mean squared error of a critic, optionally clipped around its earlier prediction.

    L = ½ mean_i (V_i - R_i)²
    L = ½ mean_i max((V_i - R_i)², (V_i^clip - R_i)²),   V^clip = V_old + clip(V - V_old, -ε, ε)

    Args:
        value: V(s) in units of reward, any shape S. The only input that receives gradient.
        returns: R, the regression target in units of reward, shape S.
        old_value: V_old, the prediction when the rollout was collected, shape S; read only with clip_range.
        clip_range: ε in units of reward (so it depends on the scale of the rewards), at least 0; None: no clipping.
        mask: true where an element counts, shape S.

    Returns:
        Scalar to minimise.

    Raises:
        ValueError: shapes differ, clip_range is negative, or clip_range is given without old_value.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (L^VF); the clipped form is that of OpenAI Baselines' PPO2,
        Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    require_same_shape(value=value, returns=returns)
    if clip_range is not None and old_value is None:
        raise ValueError("old_value is None although clip_range is given; clipping is around the old value.")
    value, returns = as_float(value), as_constant(returns)
    if mask is not None:
        # What stands under the mask may be NaN, which the square's gradient would multiply by 0.
        require_same_shape(value=value, mask=mask)
        value, returns = (torch.where(mask.bool(), x, 0.0) for x in (value, returns))
    if old_value is not None and clip_range is not None:
        require_same_shape(value=value, old_value=old_value)
        require_number("clip_range", clip_range)
        old_value = as_constant(old_value)
        old_value = old_value if mask is None else torch.where(mask.bool(), old_value, 0.0)
        clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
        error = torch.max((value - returns).square(), (clipped - returns).square())
        return 0.5 * mean_of(error, mask)
    if mask is None:
        return 0.5 * F.mse_loss(*_promoted(value, returns))
    return 0.5 * mean_of((value - returns).square(), mask)


def _promoted(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in the wider of their precisions; the losses of torch 2.6 have no gradient of mixed ones."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


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
    prediction, target = _promoted(as_float(prediction), as_constant(target))
    if loss == "mse":
        error = F.mse_loss(prediction, target, reduction=reduction)
    else:
        error = F.smooth_l1_loss(prediction, target, reduction=reduction)
    if weight is None:
        return error
    require_same_shape(prediction=prediction, weight=weight)
    return (as_constant(weight) * error).mean()


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """The share of the returns' variance that the critic explains: 1 is perfect, 0 equals a constant.

    1 - Var(R - V) / Var(R)

    Args:
        value: V(s) in units of reward, any shape S.
        returns: R in units of reward, shape S.

    Returns:
        Scalar of at most 1 (negative: worse than a constant), detached; NaN when no returns vary.

    Raises:
        ValueError: shapes differ.

    Source: Stable-Baselines3's ``train/explained_variance``; the coefficient of determination of V + constant.
    """
    require_same_shape(value=value, returns=returns)
    value, returns = as_constant(value).flatten(), as_constant(returns).flatten()
    if not value.numel():
        return value.new_full((), torch.nan)
    # From the first one: around a rounded mean, constant returns would have a variance, by which is divided.
    total = (returns - returns[:1]).var(correction=0)
    # 0 / 0 is already NaN; the case to catch is a critic that is wrong about constant returns, -inf otherwise.
    return torch.where(total == 0, torch.nan, 1 - (returns - value).var(correction=0) / total)
