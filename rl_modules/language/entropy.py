"""Entropy in GRPO's loss: the tokens with the highest ones, and a bonus."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_modules.language.grpo import GRPO


def entropy_terms(module: "GRPO", entropy: Tensor, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor | float]:
    """Returns the batch with advantages of uncertain tokens only, and the bonus times its weight.

    The bonus is this micro-batch's part of the step's mean entropy of these tokens, in which each counts as much as any
    other; ``entropy`` is [b, L].
    """
    uncertain = batch["mask"]
    if module.top_entropy_quantile < 1:
        uncertain = uncertain_tokens(module, entropy.detach(), uncertain)
        advantage = batch["advantage"] if batch["advantage"].ndim == 2 else batch["advantage"].unsqueeze(1)
        batch = {**batch, "advantage": torch.where(uncertain, advantage, 0.0)}
    if not module.entropy_coef:
        return batch, 0.0
    # So many of a step's tokens are at or above the quantile; those of later micro-batches are not known yet.
    total = batch["step_tokens"] * module._world_size
    kept = (total - ((total - 1) * (1 - module.top_entropy_quantile)).ceil()).clamp(min=1)
    mean = torch.where(uncertain, entropy, 0.0).sum() * module._world_size / kept
    return batch, module.entropy_coef * mean * batch["n_micro"]


def uncertain_tokens(module: "GRPO", entropy: Tensor, mask: Tensor) -> Tensor:
    """Returns the tokens with the ``top_entropy_quantile`` of all ranks' entropies, as in TRL, [b, L] bool."""
    values = torch.where(mask, entropy, torch.nan)
    if module._world_size > 1:
        width = module.most_over_ranks(values.shape[1])
        values = module.gathered(torch.nn.functional.pad(values, (0, width - values.shape[1]), value=torch.nan))
    return mask & (entropy >= quantile(values, 1 - module.top_entropy_quantile))


def quantile(values: Tensor, q: float) -> Tensor:
    """The ``q``-quantile of the numbers among ``values``; ``torch.nanquantile`` takes 16 million values at most."""
    ordered = values.flatten().sort().values  # NaN comes last
    rank = (values.isnan().logical_not().sum() - 1).clamp(min=0) * q
    below = rank.floor()
    low, high = ordered[torch.stack([below, rank.ceil()]).long()]
    return low.lerp(high, (rank - below).to(low.dtype))
