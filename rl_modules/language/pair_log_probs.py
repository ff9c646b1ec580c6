"""Log-probabilities of pairs of answers by one forward pass, which in packed rows reads their common prompt once."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.logits import logits_at
from rl_modules.language.pair_scores import keeps_pairs_apart, packed_inputs
from rl_modules.language.self_check import probe_texts, side_by_side


def can_pack_pairs(model: Any) -> bool:
    """Whether answers in packed rows have the log-probabilities that each has alone: see :func:`pair_log_probs`.

    Args:
        model: causal language model.
    """
    return keeps_pairs_apart(model, _compare, _beside_another)


def _beside_another(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities of two answers whose neighbours in the row change, to detect any leak in any dtype."""
    pieces = probe_texts(model, [2, 2, 2] * 3)
    found = [pair_log_probs(model, _in_one_row(pieces[start : start + 3] + pieces[6:]))[0][1::2] for start in (0, 3)]
    return found[1], found[0], found[0]


def _compare(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of two pairs' answers: in one row, alone, and padded."""
    pieces = probe_texts(model, [3, 2, 3, 2, 4, 1])
    batch = _in_one_row(pieces)
    packed, _ = pair_log_probs(model, batch)
    texts = [(pieces[prompt], pieces[answer]) for prompt, answer in ((0, 1), (3, 4), (0, 2), (3, 5))]
    rows = side_by_side([torch.cat(text) for text in texts])
    ends = [i * rows.shape[1] + len(prompt) + len(answer) - 1 for i, (prompt, answer) in enumerate(texts)]
    padded = {"tokens": rows, "lengths": batch["lengths"], "last": torch.tensor(ends, device=rows.device)}
    alone = torch.zeros_like(packed)
    for i, (prompt, answer) in enumerate(texts):
        logits = model(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits[:, len(prompt) - 1 : -1]
        alone[i, : len(answer)] = F.token_log_probs(logits, answer[None])[0]
    return packed, alone, pair_log_probs(model, padded)[0]


def _in_one_row(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Packs prompts, chosen and rejected answers in turn into the batch of one row."""
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device).view(-1, 3)
    sizes = lengths.flatten()
    segment = torch.arange(len(pieces), device=sizes.device).repeat_interleave(sizes)
    starts = [0 if i % 3 == 0 else len(pieces[i - i % 3]) for i in range(len(pieces))]
    position = [torch.arange(len(p), device=p.device) + start for p, start in zip(pieces, starts, strict=True)]
    return {
        "tokens": torch.cat(pieces)[None], "lengths": lengths,
        "last": (sizes.cumsum(0) - 1).view(-1, 3)[:, 1:].T.flatten(),  # chosen answers, then rejected ones
        "position_ids": torch.cat(position)[None], "segment": segment[None], "prompt_segment": (segment // 3 * 3)[None],
    }  # fmt: skip


def pair_log_probs(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log π of every token of the chosen and of the rejected answers.

    Logits are computed for the places that predict an answer's token and no others.

    Args:
        model: causal language model.
        batch: ``tokens`` [rows, width]; ``lengths`` [b, 3], the tokens of prompt, chosen and rejected answer; ``last``
            [2b], the places in ``tokens.flatten()`` of all sequences' last tokens, the chosen ones first. Where rows
            are packed also ``position_ids``, ``segment`` and ``prompt_segment`` [rows, width].

    Returns:
        log π(y_t) in nats, [2b, L] float32, the chosen answers first, 0 after each answer's end; and where a token
        counts, [2b, L] bool.
    """
    tokens, lengths = batch["tokens"], batch["lengths"]
    b, packed = len(lengths), "segment" in batch
    length = torch.cat([lengths[:, 1], lengths[:, 2]])
    width = int(length.max())
    columns = torch.arange(width, device=tokens.device)
    start = batch["last"] - length + 1
    counts = columns < length.unsqueeze(1)
    # Clamped where no token counts, because nothing is read there.
    place = (start.unsqueeze(1) + columns).clamp(max=tokens.numel() - 1)
    target = tokens.flatten()[place]
    # In a packed row the end of the prompt predicts the first token of both answers: its logits are computed once.
    own = counts.clone()
    if packed:
        own[b:, 0] = False
    logits = logits_at(model, place[own] - 1, input_ids=tokens, **packed_inputs(model, batch))
    values = F.token_log_probs(logits, target[own].unsqueeze(0)).squeeze(0)
    where = own.flatten().nonzero().squeeze(1)
    if packed:
        ends_of_prompts = length[:b].cumsum(0) - length[:b]
        firsts = F.token_log_probs(logits.index_select(1, ends_of_prompts), target[b:, 0].unsqueeze(0)).squeeze(0)
        values = torch.cat([values, firsts])
        where = torch.cat([where, torch.arange(b, 2 * b, device=tokens.device) * width])
    return values.new_zeros(counts.numel()).index_copy(0, where, values).view(counts.shape), counts
