"""Rewards of RLHF: a score for the whole answer, a KL penalty on each token, and the penalty's coefficient."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    require_ndim,
    require_number,
    require_positive,
    require_same_shape,
    require_shape,
)


def rlhf_rewards(score: Tensor, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Token rewards of RLHF: a KL penalty on each token, and the score on the last one.

    r_t = -β (log π(y_t) - log π_ref(y_t)) + [t is the last counted token] score

    Args:
        score: the reward model's judgement of the whole answer, shape (B,), in units of reward.
        log_prob: log π(y_t) in nats under the policy that sampled, shape (B, L).
        ref_log_prob: log π_ref(y_t) in nats, shape (B, L).
        mask: true (nonzero) where a token belongs to the answer, shape (B, L). Gaps are allowed: the score is added at
            the last true position of the mask.
        beta: β, units of reward per nat, at least 0.

    Returns:
        r, shape (B, L), in units of reward, detached; 0 where the mask is false. A row without counted tokens is 0
        throughout, without its score.

    Raises:
        ValueError: shapes do not fit, or beta is negative.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2, with the logarithm of a product as a sum over tokens.
    """
    require_ndim("log_prob", log_prob, 2, "[B, L]")
    require_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob, mask=mask)
    require_shape("score", score, log_prob.shape[:1], "log_prob's first dimension")
    require_number("beta", beta)
    counts = mask.bool()
    # A β of 0 does not multiply: a token that the reference forbids has an infinite difference.
    difference = as_constant(log_prob) - as_constant(ref_log_prob)
    penalty = torch.where(counts, difference, 0.0) * -beta if beta else torch.zeros_like(difference)
    is_last = counts & (counts.cumsum(-1) == counts.sum(-1, keepdim=True))
    return penalty + torch.where(is_last, as_constant(score).unsqueeze(-1), 0.0)


def proportional_kl_coefficient(beta: float, kl: float | Tensor, target: float, gain: float = 0.1) -> float:
    """RLHF's rule for the KL coefficient: a controller that changes log β in proportion to the error.

    e = clip((KL - target) / target, -0.2, 0.2)
    β ← β (1 + K e)

    Args:
        beta: β, at least 0.
        kl: the mean over answers of KL(π || π_ref), summed over an answer's tokens, in nats; a number or a scalar
            tensor (whose value is read, which synchronises a GPU). Call this once per batch of new answers.
        target: the KL to hold, in nats per answer, above 0.
        gain: K, at least 0 and below 5 (a larger one could turn β negative).

    Returns:
        The β of the next batch.

    Raises:
        ValueError: beta or gain is out of range, target is not positive, or kl is NaN.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (K = 0.1).
    """
    require_number("beta", beta)
    require_positive("target", target)
    if not 0 <= gain < 5:
        raise ValueError(f"gain must lie in [0, 5), got {gain!r}.")
    measured = float(kl)
    if measured != measured:
        raise ValueError("kl must be a number, got nan: the policy has diverged.")
    error = min(max((measured - target) / target, -0.2), 0.2)
    return float(beta) * (1 + gain * error)
