"""Importance weights that correct for the sampler, and their metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_NAME = "importance_sampling_correction"


def filters_of(policy: Any) -> list[str]:
    """The policy's arguments with which it samples from another distribution than it trains, as ``name=value``."""
    idle: dict[str, tuple] = {"top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0), "repetition_penalty": (1,)}
    return [f"{name}={value}" for name, off in idle.items() if (value := getattr(policy, name)) not in off]


def correction_of(policy: Any) -> str:
    """Returns the mode of the correction: the given one, or a default if another engine or older weights sample.

    The default is TRL's, except for filtered sampling: there the weight of a completion is the product of the masses
    that the filter keeps of each token, which falls exponentially with the length.
    """
    given: str | None = policy.hparams[_NAME]
    if given is not None:
        return given
    if policy.hparams["sampler"] == "native" and not policy.samples_ahead:
        return "none"
    if filters_of(policy):
        return "token_truncate" if policy.weights_tokens else "none"
    return "sequence_mask"


def warn_of_filters(policy: Any) -> None:
    """Warns if filtered sampling changes the default mode, or makes the weights of the given one tiny."""
    filters, given, mode = ", ".join(filters_of(policy)), policy.hparams[_NAME], correction_of(policy)
    why = f"under {filters} the weight of a completion is the product of the probability masses kept of its tokens"
    if not filters:
        return
    if given is not None and given.startswith("sequence"):
        instead = "token_truncate" if policy.weights_tokens else "none"
        rank_zero_warn(f"{_NAME}={given!r}: {why}, so that nothing is learned from long ones; take {instead}")
    elif given is None and (policy.hparams["sampler"] != "native" or policy.samples_ahead):
        rank_zero_warn(f"{_NAME} is {mode} in this run, in place of sequence_mask: {why}, near 0 for a long one")


def sampling_metrics(fields: dict[str, Tensor], mode: str, gathered: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns metrics of the difference between the sampler's and training's log-probabilities, over all ranks."""
    mask, weight = fields["mask"], fields["importance_weight"]
    difference = (fields["log_prob"] - fields["sampling_log_prob"]).abs()
    known = mask & ~difference.isnan()
    counts = mask.clone()
    if mode.startswith("sequence"):
        counts[:, 1:] = False
    columns = [
        torch.where(known, difference, 0.0).sum(1), known.sum(1), torch.where(known, difference, 0.0).amax(1),
        torch.where(counts, weight, 0.0).sum(1), counts.sum(1),
        torch.where(counts, weight, torch.inf).amin(1), torch.where(counts, weight, -torch.inf).amax(1),
        (counts & (weight == 0)).sum(1),
    ]  # fmt: skip
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
