"""Importance weights that correct for the sampler, and their metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_modules import functional as F

if TYPE_CHECKING:
    from rl_modules.language.policy_with_reference import PolicyWithReference


_NAME = "importance_sampling_correction"


def warn_of_lacking_support(policy: PolicyWithReference) -> None:
    """Warns that training's log-probabilities are not those of sampling."""
    filters = ", ".join(policy.truncations)
    text = (
        f"sampler={policy.hparams['sampler']!r} does not return the tokens that {filters} kept, so that training's "
        "log-probabilities are those of all tokens; take native, or vLLM 0.28 or newer on CUDA"
    )
    if (given := policy.hparams.get(_NAME, "none")) is None:
        text += f". {_NAME} is {policy.correction} in this run"
    elif given.startswith("sequence"):
        text += f". With {_NAME}={given!r} the weight of a completion is the product of the kept masses of its tokens"
    rank_zero_warn(text)


def importance_weights(policy: PolicyWithReference, fields: dict[str, Tensor], sampled: Tensor) -> dict[str, Tensor]:
    """Returns the sampler's log-probabilities and a factor on each token's policy loss, [B, L]; records both."""
    hp, mode = policy.hparams, policy.correction
    bounds = hp["importance_sampling_clip_min"], hp["importance_sampling_clip_max"]
    weight = F.importance_weights(fields["log_prob"], sampled, fields["mask"], mode, *bounds)
    added = {"sampling_log_prob": sampled, "importance_weight": weight}
    policy.record(**sampling_metrics({**fields, **added}, mode, policy.gathered))
    return added


def sampling_metrics(fields: dict[str, Tensor], mode: str, gathered: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns metrics of the difference between the sampler's and training's log-probabilities, over all ranks."""
    mask, weight = fields["mask"], fields["importance_weight"]
    difference = (fields["log_prob"] - fields["sampling_log_prob"]).abs()
    known = mask & ~difference.isnan()
    counts = mask.clone()
    if mode.startswith("sequence"):
        counts[:, 1:] = False
    columns = [
        torch.where(known, difference, 0.0).sum(1),
        known.sum(1),
        torch.where(known, difference, 0.0).amax(1),
        torch.where(counts, weight, 0.0).sum(1),
        counts.sum(1),
        torch.where(counts, weight, torch.inf).amin(1),
        torch.where(counts, weight, -torch.inf).amax(1),
        (counts & (weight == 0)).sum(1),
    ]
    table = gathered(torch.stack([column.float() for column in columns], 1))
    total, n_known, largest, weights, n, least, most, masked = table.unbind(1)
    n = n.sum()
    nothing = n == 0  # every completion was cut off and left out
    return {
        "sampling/logp_difference/mean": total.sum() / n_known.sum().clamp(min=1),
        "sampling/logp_difference/max": largest.amax(),
        "sampling/importance_ratio/min": torch.where(nothing, 0.0, least.amin()),
        "sampling/importance_ratio/mean": weights.sum() / n.clamp(min=1),
        "sampling/importance_ratio/max": torch.where(nothing, 0.0, most.amax()),
        "sampling/masked": masked.sum() / n.clamp(min=1),
    }
