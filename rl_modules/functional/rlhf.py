"""Rewards of language models: of a reward model and its training, per token, of an answer's length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    require_ndim,
    require_number,
    require_positive,
    require_same_shape,
    require_shape,
    require_tensors,
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


def soft_overlong_punishment(length: Tensor, max_completion_length: int, soft_punish_cache: int) -> Tensor:
    """DAPO's soft penalty on long answers: 0, then a linear ramp, then -1.

    R(y) = 0                                          |y| ≤ L_max - L_cache
    R(y) = ((L_max - L_cache) - |y|) / L_cache        L_max - L_cache < |y| ≤ L_max
    R(y) = -1                                         L_max < |y|

    Args:
        length: |y|, the number of tokens of each answer, shape (B,).
        max_completion_length: L_max in tokens, at least 1.
        soft_punish_cache: L_cache, the width of the ramp in tokens, from 0 (no ramp) to max_completion_length.

    Returns:
        R, shape (B,), in units of reward, in [-1, 0], detached.

    Raises:
        ValueError: length is not one-dimensional, or a number of tokens is out of range.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13. Equals TRL 1.16's ``get_soft_overlong_punishment``.
    """
    require_tensors(length=length)
    if length.ndim != 1:
        raise ValueError(f"length has shape {tuple(length.shape)}, expected 1 dimension [B].")
    if max_completion_length < 1:
        raise ValueError(f"max_completion_length must be at least 1 token, got {max_completion_length!r}.")
    if not 0 <= soft_punish_cache <= max_completion_length:
        raise ValueError(
            f"soft_punish_cache must lie in [0, {max_completion_length}] (max_completion_length), "
            f"got {soft_punish_cache!r}."
        )
    excess = as_float(length.detach()) - (max_completion_length - soft_punish_cache)
    if soft_punish_cache == 0:
        return -(excess > 0).to(excess.dtype)
    return -(excess / soft_punish_cache).clamp(0.0, 1.0)


def bradley_terry_loss(
    chosen_reward: Tensor,
    rejected_reward: Tensor,
    margin: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """The negative log-likelihood of the observed preferences.

    L = mean_i [ -log σ(r_c - r_r - m) + c (r_c + r_r)² ]

    Preferences fix only differences of rewards; the second term keeps their mean at zero.

    Args:
        chosen_reward: r_c, the score of the preferred answer, any shape S; receives gradient.
        rejected_reward: r_r, the score of the other one, shape S; receives gradient.
        margin: m, margin of the preferred answer, in units of reward, shape S; None: 0.
        center_rewards_coefficient: c, at least 0.

    Returns:
        Scalar to minimise; log 2 for equal scores of 0 without margin.

    Raises:
        ValueError: shapes differ, or center_rewards_coefficient is negative.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2;
        centring: Eisenstein et al. 2023, arXiv:2312.09244.
    """
    require_same_shape(chosen_reward=chosen_reward, rejected_reward=rejected_reward)
    require_number("center_rewards_coefficient", center_rewards_coefficient)
    chosen_reward, rejected_reward = as_float(chosen_reward), as_float(rejected_reward)
    lead = chosen_reward - rejected_reward
    if margin is not None:
        require_same_shape(chosen_reward=chosen_reward, margin=margin)
        lead = lead - as_constant(margin)
    loss = -F.logsigmoid(lead).mean()
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (chosen_reward + rejected_reward).square().mean()
    return loss
