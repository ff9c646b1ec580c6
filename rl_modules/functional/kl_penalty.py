"""PPO's other objective: a penalty on the KL from the policy that acted, with a coefficient that follows it."""

from __future__ import annotations

from torch import Tensor

from rl_modules.functional.checks import as_float, require_number, require_positive, require_same_shape, require_tensors
from rl_modules.functional.policy import _ratio_and_advantage
from rl_modules.functional.reductions import mean_of


def ppo_penalty_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, kl: Tensor, beta: float, mask: Tensor | None = None
) -> Tensor:
    """PPO's penalised policy loss: the unclipped surrogate with a penalty on the KL from the old policy.

    L = -mean_i (ρ_i A_i - β KL_i),   ρ_i = exp(log_prob_i - old_log_prob_i)

    Args:
        log_prob: log π(a|s) in nats, any shape S; receives gradient.
        old_log_prob: the same under the policy that acted, shape S.
        advantage: A, in units of reward (unit-free once normalised), shape S.
        kl: KL(π_old(·|s) || π(·|s)) in nats, shape S, or a scalar that is already a mean; receives gradient.
        beta: β, units of advantage per nat, at least 0; ``adapt_kl_coefficient`` adjusts it once per policy update.
        mask: true where an element counts, shape S.

    Returns:
        Scalar to minimise.

    Raises:
        ValueError: shapes differ, or beta is negative.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 8, sign flipped.
    """
    require_number("beta", beta)
    ratio, advantage = _ratio_and_advantage(log_prob, old_log_prob, advantage, mask)
    require_tensors(kl=kl)
    if kl.ndim == 0:
        penalty = as_float(kl)
    else:
        require_same_shape(log_prob=log_prob, kl=kl)
        penalty = mean_of(as_float(kl), mask)
    return beta * penalty - mean_of(ratio * advantage, mask)


def adapt_kl_coefficient(beta: float, kl: float | Tensor, target: float) -> float:
    """PPO's rule for the KL coefficient: halved if the KL is too small, doubled if it is too large.

    β ← β / 2   if KL < target / 1.5
    β ← 2 β     if KL > 1.5 target
    β           otherwise

    Args:
        beta: β, at least 0.
        kl: the mean KL(π_old || π) of the update just made, in nats, a number or a scalar tensor (whose value is read,
            which synchronises a GPU). Call this once per policy update, not once per minibatch.
        target: target of the KL, in nats, above 0.

    Returns:
        The β of the next update.

    Raises:
        ValueError: beta is negative, target is not positive, or kl is NaN.

    Source: Schulman et al. 2017, arXiv:1707.06347, section 4.
    """
    require_number("beta", beta)
    require_positive("target", target)
    beta, measured = float(beta), float(kl)
    if measured != measured:
        raise ValueError("kl must be a number, got nan: the policy has diverged.")
    if measured < target / 1.5:
        return beta / 2
    if measured > target * 1.5:
        return beta * 2
    return beta
