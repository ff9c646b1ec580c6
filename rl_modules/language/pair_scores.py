"""Scores of pairs of answers, both by one forward pass, which reads their common prompt once if possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_modules.language.scoring import scores_at
from rl_modules.language.self_check import agrees, probe_texts, shortest_window, side_by_side

Comparison = Callable[[Any], tuple[Tensor, Tensor, Tensor]]


def can_pack(model: Any) -> bool:
    """Returns whether a model reads several pairs in one row, each apart from the others: see :func:`pair_scores`.

    Args:
        model: model with a ``score`` head of one output.
    """
    return keeps_pairs_apart(model, _compare, _beside_another)


def _beside_another(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores of two answers whose neighbours in the row change, to detect any leak in any dtype."""
    first, second, own = probe_texts(model, [6, 6, 6])
    segment = torch.arange(6, device=own.device).repeat_interleave(2)
    position = torch.tensor([0, 1, 2, 3, 2, 3], device=own.device).repeat(2)
    batch = {"position_ids": position[None], "segment": segment[None], "prompt_segment": (segment // 3 * 3)[None],
             "last": torch.tensor([9, 11], device=own.device)}  # fmt: skip
    found = [torch.cat(pair_scores(model, {**batch, "tokens": torch.cat([neighbour, own])[None]}))
             for neighbour in (first, second)]  # fmt: skip
    return found[1], found[0], found[0]


def _compare(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of two pairs' answers: in one row, alone, and padded."""
    prompts, chosen, rejected = ([*probe_texts(model, lengths)] for lengths in ([3, 2], [2, 4], [3, 1]))
    pieces = [piece for pair in zip(prompts, chosen, rejected, strict=True) for piece in pair]
    segment = torch.cat([torch.full_like(piece, i) for i, piece in enumerate(pieces)])
    starts = [0, 3, 3, 0, 2, 2]
    position = torch.cat([torch.arange(len(p), device=p.device) + s for p, s in zip(pieces, starts, strict=True)])
    ends = torch.tensor([len(piece) for piece in pieces], device=segment.device).cumsum(0) - 1
    batch = {"tokens": torch.cat(pieces)[None], "position_ids": position[None], "segment": segment[None],
             "prompt_segment": (segment // 3 * 3)[None], "last": ends[[1, 4, 2, 5]]}  # fmt: skip
    packed = torch.cat(pair_scores(model, batch))
    texts = [torch.cat([prompt, answer]) for answers in (chosen, rejected)
             for prompt, answer in zip(prompts, answers, strict=True)]  # fmt: skip
    alone = [scores_at(model, text[None], torch.tensor([len(text) - 1], device=text.device)) for text in texts]
    rows = side_by_side(texts)
    last = torch.tensor([i * rows.shape[1] + len(text) - 1 for i, text in enumerate(texts)], device=rows.device)
    return packed, torch.cat(alone), scores_at(model, rows, last)


def pair_scores(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Raw scores of the chosen and of the rejected answers, [b] float32 each.

    Args:
        model: model with a ``score`` head of one output.
        batch: ``tokens`` [rows, width]; ``last`` [2b], the places in ``tokens.flatten()`` of the last tokens of all
            sequences, the chosen ones first. Where rows are packed also ``position_ids``, ``segment`` and
            ``prompt_segment`` [rows, width], see :func:`visible`.
    """
    chosen, rejected = scores_at(model, batch["tokens"], batch["last"], **packed_inputs(model, batch)).chunk(2)
    return chosen, rejected


def keeps_pairs_apart(model: Any, compare: Comparison, beside_another: Comparison) -> bool:
    """Returns whether a model accepts the mask of packed rows and computes the same with it as without packing.

    Args:
        model: causal language model or model with a ``score`` head.
        compare: the model's numbers of packed, single and padded texts: see :func:`agrees`.
        beside_another: its numbers of a pair next to two different neighbours; they must be equal.
    """
    # A window is part of the mask that the model makes, and is lost if a mask is given.
    return (
        shortest_window(model.config) is None
        and model.config._attn_implementation in ("sdpa", "eager")
        and agrees(model, "packing pairs", lambda: compare(model), "")
        and agrees(model, "packing beside another pair", lambda: beside_another(model), "", exact=True)
    )


def packed_inputs(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the model's inputs besides the tokens: mask and positions for packed rows, otherwise none.

    Args:
        model: model whose attention is ``sdpa`` or ``eager``.
        batch: see :func:`pair_scores`.

    Returns:
        ``attention_mask`` [rows, 1, width, width] and ``position_ids`` [rows, width], or an empty dictionary.
    """
    if "segment" not in batch:
        return {}
    mask = visible(batch["segment"], batch["prompt_segment"]).unsqueeze(1)
    if model.config._attn_implementation == "eager":
        # It adds the mask to its scores.
        dtype = next(model.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return {"attention_mask": mask, "position_ids": batch["position_ids"]}


def visible(segment: Tensor, prompt_segment: Tensor) -> Tensor:
    """Returns which tokens each token attends to: itself, and those before it in its own segment and in its prompt's.

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
