"""Policy losses: how an advantage becomes a gradient on the log-probability of an action."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, as_float, bounded, require_number, require_same_shape
from rl_modules.functional.reductions import mean_of


def policy_gradient_loss(log_prob: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """The policy-gradient loss, which raises the probability of actions with positive weight.

    L = -mean_i w_i log π(a_i|s_i)

    Args:
        log_prob: log π(a|s) in nats, any shape S. The only input that receives gradient.
        weight: w, a return (REINFORCE) or an advantage (A2C), in units of reward, shape S.
        mask: true where an element counts, shape S.

    Returns:
        Scalar to minimise. Its gradient is the policy gradient; its value does not measure progress.

    Raises:
        ValueError: shapes differ (a (B, 1) input would broadcast silently to (B, B)).

    Source: Williams 1992; Sutton & Barto 2018, eq. 13.8, sign flipped.
    """
    require_same_shape(log_prob=log_prob, weight=weight)
    weight = as_constant(weight)
    if mask is not None:
        # What stands under the mask may be NaN, which the product's gradient would multiply by 0.
        require_same_shape(log_prob=log_prob, mask=mask)
        weight = torch.where(mask.bool(), weight, 0.0)
    return -mean_of(as_float(log_prob) * weight, mask)


def ppo_clip_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float, mask: Tensor | None = None
) -> Tensor:
    """PPO's clipped policy loss, without gain from ratios beyond the clip range.

    L = -mean_i min(ρ_i A_i, clip(ρ_i, 1-ε, 1+ε) A_i),   ρ_i = exp(log_prob_i - old_log_prob_i)

    Args:
        log_prob: log π(a|s) in nats, any shape S. The only input that receives gradient.
        old_log_prob: the same under the policy that acted, shape S.
        advantage: A, in units of reward (unit-free once normalised), shape S.
        clip_range: ε, at least 0; 0 is where a linear schedule ends.
        mask: true where an element counts, shape S.

    Returns:
        Scalar to minimise; equals ``-advantage.mean()`` while the policy is unchanged. A log-ratio whose exponential
        would be infinite (above 88.7 in float32) counts as the largest finite one, and receives no gradient.

    Raises:
        ValueError: shapes differ (a (B, 1) input would broadcast silently to (B, B)), or clip_range is negative.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7, sign flipped.
    """
    require_number("clip_range", clip_range)
    ratio, advantage = _ratio_and_advantage(log_prob, old_log_prob, advantage, mask)
    surrogate = ratio * advantage
    # min(ρA, clip(ρ)A) = min(ρA, A + ε|A|): only the bound that the advantage's sign points to can be active. This
    # form needs half the kernels of the clamp, and `where` keeps the whole gradient where the two are equal.
    bound = torch.add(advantage, advantage.abs(), alpha=clip_range)
    return -mean_of(torch.where(surrogate > bound, bound, surrogate), mask)


def clip_fraction(log_prob: Tensor, old_log_prob: Tensor, clip_range: float) -> Tensor:
    """The share of samples whose ratio is outside the clip range.

    mean_i [ |ρ_i - 1| > ε ],   ρ_i = exp(log_prob_i - old_log_prob_i)

    Args:
        log_prob: log π(a|s) in nats, any shape S.
        old_log_prob: the same under the policy that acted, shape S.
        clip_range: ε, at least 0.

    Returns:
        Scalar in [0, 1], detached.

    Raises:
        ValueError: shapes differ, or clip_range is negative.

    Source: the diagnostic of OpenAI Baselines' PPO2, logged by Stable-Baselines3 as ``train/clip_fraction``.
    """
    require_number("clip_range", clip_range)
    require_same_shape(log_prob=log_prob, old_log_prob=old_log_prob)
    ratio = (as_constant(log_prob) - as_constant(old_log_prob)).exp()
    return ((ratio - 1).abs() > clip_range).float().mean()


def approx_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """KL between the policies before and after an update: the mean of k3 over samples of the old policy.

    KL(π_old || π) ≈ mean_i (e^{d_i} - 1 - d_i),   d = log_prob - old_log_prob

    Args:
        log_prob: log π(a|s) in nats, any shape S.
        old_log_prob: the same under the policy that acted, shape S.

    Returns:
        Scalar in nats, never negative, detached.

    Raises:
        ValueError: shapes differ.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Stable-Baselines3 logs it as ``train/approx_kl`` and
        compares it with ``target_kl``.
    """
    require_same_shape(log_prob=log_prob, old_log_prob=old_log_prob)
    difference = as_constant(log_prob) - as_constant(old_log_prob)
    return (torch.expm1(difference) - difference).mean()


def _ratio_and_advantage(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    require_same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    log_ratio = as_float(log_prob) - as_constant(old_log_prob)
    if mask is not None:
        require_same_shape(log_prob=log_prob, mask=mask)
        # Before exp: what stands under padding may overflow there, and 0 * inf in the backward pass is NaN.
        log_ratio = torch.where(mask.bool(), log_ratio, 0.0)
    return bounded(log_ratio).exp(), as_constant(advantage)
