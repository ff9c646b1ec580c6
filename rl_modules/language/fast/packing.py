"""Several texts, or pairs of answers, in one row, which do not attend to each other; the plain twin is a row for each.

A self-check compares packed, single and padded texts: recurrent states, convolutions, ALiBi and positions that are
counted by the model itself run on from text to text.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_modules import functional as F
from rl_modules.fast import is_fast
from rl_modules.language.architecture import text_config
from rl_modules.language.critics import scores_at
from rl_modules.language.fast.self_check import agrees, alone_with, probe_texts, shortest_window, side_by_side
from rl_modules.language.fast.varlen import inputs_of_texts
from rl_modules.language.pairs import pair_log_probs, pair_scores
from rl_modules.language.scoring import logits_at

#: Lengths of the texts in each row of the self-check; the rest of a row's 12 places is padding.
_ROWS = ((5, 3, 2), (9, 3))
_WIDTH = 12
#: Lengths of prompt, chosen and rejected answer of its two pairs.
_PAIRS = (3, 2, 3, 2, 4, 1)


# ---------------------------------------------------------------- texts


def packed_inputs(model: Any, tokens: Tensor, position_ids: Tensor, boundaries: Tensor | None = None) -> dict[str, Any]:
    """The inputs of a causal model for packed rows, [rows, width]; positions are 0 where a text begins.

    ``boundaries`` [n + 1] int32: places in ``tokens.flatten()`` where texts begin, and its length.
    """
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": position_ids}
    if not wants_one_row(model):
        return inputs
    inputs = {name: value.view(1, -1) for name, value in inputs.items()}
    if "varlen" in model.config._attn_implementation:
        inputs |= inputs_of_texts(position_ids, tokens.shape[1], boundaries)
    return inputs


def wants_one_row(model: Any) -> bool:
    """Whether packed rows go end to end: flash attention and varlen separate texts within one row only."""
    return any(name in str(model.config._attn_implementation) for name in ("flash", "varlen"))


def can_pack_texts(model: Any) -> bool:
    """Whether texts in one row, separated by ``position_ids``, have the log-probabilities that each has alone."""
    # Chunks of chunked attention are counted from the row's beginning, not from the text's.
    if not is_fast() or getattr(text_config(model.config), "attention_chunk_size", None):
        return False
    instead = "every text has a row of its own"
    return agrees(model, "packing", lambda: _compare_texts(model), instead) and agrees(
        model, "packing beside another text", lambda: _text_beside_another(model), instead
    )


def _text_beside_another(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of the logits of a row's second text, and the tokens of the first."""
    tokens = nn.functional.pad(torch.cat(probe_texts(model, [5, 6])), (0, 1))
    place = torch.arange(5, 11, device=tokens.device)
    position = torch.cat([torch.arange(5), torch.arange(6), torch.zeros(1, dtype=torch.long)])[None].to(tokens.device)
    inputs = packed_inputs(model, tokens[None], position)
    return alone_with(model, lambda: logits_at(model, place, **inputs), slice(5))


def _compare_texts(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    texts = probe_texts(model, [n for row in _ROWS for n in row])
    tokens = side_by_side([torch.cat(texts[:3]), torch.cat(texts[3:])])
    position = torch.zeros_like(tokens)
    counted: list[Tensor] = []
    for i, row in enumerate(_ROWS):
        column = 0
        for n in row:
            position[i, column : column + n] = torch.arange(n, device=tokens.device)
            counted.append(torch.arange(column + 1, column + n, device=tokens.device) + i * _WIDTH)
            column += n
    place = torch.cat(counted)
    target = tokens.flatten()[place].unsqueeze(0)
    packed = F.token_log_probs(logits_at(model, place - 1, **packed_inputs(model, tokens, position)), target)
    alone = [F.token_log_probs(_logits(model, text[None])[:, :-1], text[None, 1:]) for text in texts]
    rows = side_by_side(texts)
    batched = F.token_log_probs(_logits(model, rows)[:, :-1], rows[:, 1:])
    kept = [row[: len(text) - 1] for row, text in zip(batched, texts, strict=True)]
    return packed[0], torch.cat(alone, 1)[0], torch.cat(kept)


def _logits(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


# ---------------------------------------------------------------- pairs of answers


def can_pack_pairs(model: Any) -> bool:
    """Whether answers in packed rows have the log-probabilities that each has alone, by a causal model."""

    def alone(prompt: Tensor, answer: Tensor) -> Tensor:
        logits = _logits(model, torch.cat([prompt, answer])[None])[:, len(prompt) - 1 : -1]
        return F.token_log_probs(logits, answer[None])[0]

    return _keeps_pairs_apart(model, lambda batch: pair_log_probs(model, batch)[0], alone)


def can_pack_scores(model: Any) -> bool:
    """Whether answers in packed rows have the scores that each has alone, by a model with a ``score`` head."""

    def alone(prompt: Tensor, answer: Tensor) -> Tensor:
        text = torch.cat([prompt, answer])
        return scores_at(model, text[None], torch.tensor([len(text) - 1], device=text.device))

    return _keeps_pairs_apart(model, lambda batch: torch.cat(pair_scores(model, batch)).unsqueeze(1), alone)


def _keeps_pairs_apart(
    model: Any, judge: Callable[[dict[str, Tensor]], Tensor], alone: Callable[[Tensor, Tensor], Tensor]
) -> bool:
    """Whether a model computes ``judge``'s numbers [2b, n] with the mask of packed rows as it does ``alone``."""

    def compare() -> tuple[Tensor, Tensor, Tensor]:
        """Numbers of two pairs' answers: in one row, alone, and padded."""
        pieces = probe_texts(model, _PAIRS)
        batch = _in_one_row(pieces)
        packed = judge(batch)
        texts = [(pieces[prompt], pieces[answer]) for prompt, answer in ((0, 1), (3, 4), (0, 2), (3, 5))]
        rows = side_by_side([torch.cat(text) for text in texts])
        ends = [i * rows.shape[1] + len(prompt) + len(answer) - 1 for i, (prompt, answer) in enumerate(texts)]
        padded = {"tokens": rows, "lengths": batch["lengths"], "last": torch.tensor(ends, device=rows.device)}
        single = torch.zeros_like(packed)
        for i, text in enumerate(texts):
            numbers = alone(*text)
            single[i, : len(numbers)] = numbers
        return packed, single, judge(padded)

    def last_answer() -> Tensor:
        return judge(_in_one_row(probe_texts(model, [2] * 6)))[-1]

    # A window is part of the mask that the model makes, and is lost if a mask is given.
    return (
        is_fast()
        and shortest_window(model.config) is None
        and model.config._attn_implementation.startswith(("sdpa", "eager"))
        and agrees(model, "packing pairs", compare, "")
        and agrees(model, "packing beside another pair", lambda: alone_with(model, last_answer, slice(6)), "")
    )


def _in_one_row(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Packs prompts, chosen and rejected answers in turn into the batch of one row."""
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device).view(-1, 3)
    sizes = lengths.flatten()
    segment = torch.arange(len(pieces), device=sizes.device).repeat_interleave(sizes)
    starts = [0 if i % 3 == 0 else len(pieces[i - i % 3]) for i in range(len(pieces))]
    position = [torch.arange(len(p), device=p.device) + start for p, start in zip(pieces, starts, strict=True)]
    return {
        "tokens": torch.cat(pieces)[None],
        "lengths": lengths,
        "last": (sizes.cumsum(0) - 1).view(-1, 3)[:, 1:].T.flatten(),  # chosen answers, then rejected ones
        "position_ids": torch.cat(position)[None],
        "segment": segment[None],
        "prompt_segment": (segment // 3 * 3)[None],
    }
