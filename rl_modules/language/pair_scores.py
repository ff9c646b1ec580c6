"""Scores of pairs of answers: of both by one forward pass, which reads their common prompt once where it can."""

from typing import Any

import torch
from torch import Tensor

from rl_modules.language.scoring import scores_at

#: Architectures whose attention is that of an explicit mask and whose places are those of ``position_ids``.
PACKABLE = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")


def can_pack(config: Any) -> bool:
    """Whether a model reads several texts in one row, each apart from the others: see :func:`pair_scores`.

    Args:
        config: of a model that was built, for it says how attention is computed.
    """
    windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return config.model_type in PACKABLE and not windows and config._attn_implementation in ("sdpa", "eager")


def pair_scores(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Raw scores of the chosen and of the rejected answers, [b] float32 each.

    Args:
        model: model with a ``score`` head of one output.
        batch: ``tokens`` [rows, width]; ``last`` [2b], the places in ``tokens.flatten()`` of the last tokens of all
            sequences, the chosen ones first. Where rows are packed also ``position_ids``, ``segment`` and
            ``prompt_segment`` [rows, width], see :func:`visible`.
    """
    inputs = {}
    if "segment" in batch:
        mask = visible(batch["segment"], batch["prompt_segment"]).unsqueeze(1)
        if model.config._attn_implementation == "eager":
            # It adds the mask to its scores.
            dtype = next(model.parameters()).dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        inputs = {"attention_mask": mask, "position_ids": batch["position_ids"]}
    chosen, rejected = scores_at(model, batch["tokens"], batch["last"], **inputs).chunk(2)
    return chosen, rejected


def visible(segment: Tensor, prompt_segment: Tensor) -> Tensor:
    """Which tokens each token may look at: those before it in its own segment and in its prompt's, and itself.

    Args:
        segment: number of the piece of text that a token belongs to, [rows, width]; -1: none.
        prompt_segment: number of the piece that its own continues, [rows, width].

    Returns:
        [rows, width, width] bool, from the reader's place to the place that is read.
    """
    width = segment.shape[1]
    keys = segment.unsqueeze(1)
    sees = (keys == segment.unsqueeze(2)) | (keys == prompt_segment.unsqueeze(2))
    return sees & torch.ones(width, width, dtype=torch.bool, device=segment.device).tril()
