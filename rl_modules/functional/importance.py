"""Importance weights between the policy that trains and the policy that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, bounded, require_choice, require_ndim, require_same_shape

_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_weights(
    log_prob: Tensor,
    sampling_log_prob: Tensor,
    mask: Tensor,
    mode: str = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """Importance weights for samples from an inference engine whose probabilities differ from the training model's.

    ρ_t = exp(log π(y_t) - log π_sampling(y_t))                            "token_…"
    ρ_t = exp(Σ_s (log π(y_s) - log π_sampling(y_s))) for every t          "sequence_…"

    w_t = clip(ρ_t, clip_min, clip_max)                                    "…_truncate"
    w_t = ρ_t where clip_min ≤ ρ_t ≤ clip_max, else 0                      "…_mask"

    Args:
        log_prob: log π(y_t) in nats under the training model before its update (the old policy), shape (B, L).
        sampling_log_prob: the same as the sampler reported it, shape (B, L); NaN (not reported) counts as no
            difference.
        mask: true (nonzero) where a token counts, shape (B, L). Other values may be arbitrary.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_min: lower bound on ρ; None: none.
        clip_max: upper bound on ρ; None: none.

    Returns:
        w, shape (B, L), detached, without unit: a factor on each token's policy loss. Tokens outside the mask have
        the weight of ρ = 1 in the token modes.

    Raises:
        ValueError: shapes differ, mode is unknown, or clip_min is above clip_max.

    Source: truncation: Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL training");
        masks: Liu et al. 2025 ("When speed kills stability"). Equals TRL 1.16's ``vllm_importance_sampling_mode``.
    """
    require_choice("mode", mode, _MODES)
    require_ndim("log_prob", log_prob, 2, "[B, L]")
    require_same_shape(log_prob=log_prob, sampling_log_prob=sampling_log_prob, mask=mask)
    if clip_min is not None and clip_max is not None and clip_min > clip_max:
        raise ValueError(f"clip_min must not be above clip_max = {clip_max!r}, got {clip_min!r}.")
    difference = as_constant(log_prob) - as_constant(sampling_log_prob)
    difference = torch.where(mask.bool() & ~difference.isnan(), difference, 0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = bounded(difference).exp()
    if mode.endswith("mask"):
        inside = torch.ones_like(ratio, dtype=torch.bool)
        if clip_min is not None:
            inside = inside & (ratio >= clip_min)
        if clip_max is not None:
            inside = inside & (ratio <= clip_max)
        ratio = torch.where(inside, ratio, 0.0)
    elif clip_min is not None or clip_max is not None:
        ratio = ratio.clamp(clip_min, clip_max)
    return ratio.expand(log_prob.shape)
