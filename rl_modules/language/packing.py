"""Packed rows: several texts in one row, which do not attend to each other."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.logits import logits_at
from rl_modules.language.models import text_config
from rl_modules.language.self_check import agrees, probe_texts, side_by_side

#: Lengths of the texts in each row of the self-check; the rest of a row's 12 places is padding.
_ROWS = ((5, 3, 2), (9, 3))
_WIDTH = 12


def packed_inputs(model: Any, tokens: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
    """Returns the inputs of a causal model for packed rows.

    Args:
        model: causal language model.
        tokens: [rows, width].
        position_ids: 0 where a text begins, and in padding, [rows, width].
    """
    inputs = {"input_ids": tokens, "position_ids": position_ids}
    return {name: value.view(1, -1) for name, value in inputs.items()} if wants_one_row(model) else inputs


def wants_one_row(model: Any) -> bool:
    """Returns whether packed rows go end to end: flash attention separates texts by position within one row only."""
    return "flash" in str(model.config._attn_implementation)


def can_pack_texts(model: Any) -> bool:
    """Returns whether texts in one row, separated by ``position_ids``, have the log-probabilities that each has alone.

    Recurrent states, convolutions, ALiBi and positions that are counted by the model itself run on from text to text.
    """
    # Chunks of chunked attention are counted from the row's beginning, not from the text's.
    if getattr(text_config(model.config), "attention_chunk_size", None):
        return False
    instead = "every text has a row of its own"
    return agrees(model, "packing", lambda: _compare(model), instead) and agrees(
        model, "packing beside another text", lambda: _beside_another(model), instead, exact=True
    )


def _beside_another(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a text whose neighbour in the row changes.

    Nothing else differs, so that a leak shows in any dtype if it moves one logit of the whole vocabulary.
    """
    first, second, text = probe_texts(model, [5, 5, 6])
    place = torch.arange(5, 11, device=text.device)
    position = torch.cat([torch.arange(5), torch.arange(6), torch.zeros(1, dtype=torch.long)])[None].to(text.device)
    found = []
    for neighbour in (first, second):
        tokens = torch.cat([neighbour, text, text.new_zeros(1)])[None]
        found.append(logits_at(model, place, **packed_inputs(model, tokens, position)))
    return found[1], found[0], found[0]


def _compare(model: Any) -> tuple[Tensor, Tensor, Tensor]:
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
