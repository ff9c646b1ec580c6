"""Checks that decoding gives a model's own log-probabilities, see :mod:`rl_modules.language.fast.self_check`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.fast.self_check import agrees, probe_texts, side_by_side
from rl_modules.language.models import text_config
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling.decode import decode, generate
from rl_modules.language.sampling.draw import NextToken, uniforms
from rl_modules.language.sampling.rows import Prompts, Record

#: Lengths of the self-check's prompts, and tokens that each is continued by.
_PROMPTS, _NEW = (4, 2, 1), (3, 3, 3)
#: The same where two rows are decoded together: the third begins beside the second, whose text is shorter.
_LATER_PROMPTS, _LATER_NEW = (2, 1, 5), (2, 4, 2)
Decode = Callable[[Prompts, NextToken, Tensor, Record], None]


def decodes(model: Any, make_cache: Callable[[int], RowCache | None]) -> bool:
    """Returns whether token-by-token decoding through a :class:`RowCache` agrees with one forward pass per text."""
    made = make_cache(max(_PROMPTS) + max(_NEW))
    if made is None:
        return False

    def run(prompts: Prompts, rule: NextToken, draws: Tensor, record: Record) -> None:
        cache = make_cache(max(_PROMPTS) + max(_NEW))  # of as many layers as the model has during the check
        assert cache is not None
        decode(model, cache, prompts, rule, draws, record, synced_gpus=False)

    what = f"decoding through a {type(made).__name__}"
    return agrees(model, what, lambda: _compare(model, run, _PROMPTS, _NEW), "")


def refills(model: Any, make_cache: Callable[[int], RowCache | None]) -> bool:
    """Whether rows that begin while others are decoded have the log-probabilities of one forward pass per text."""
    made = make_cache(max(_LATER_PROMPTS) + max(_LATER_NEW))
    if made is None:
        return False

    def run(prompts: Prompts, rule: NextToken, draws: Tensor, record: Record) -> None:
        cache = make_cache(max(_LATER_PROMPTS) + max(_LATER_NEW))
        assert cache is not None
        decode(model, cache, prompts, rule, draws, record, synced_gpus=False, at_once=2)

    return agrees(
        model, f"refilling a {type(made).__name__}", lambda: _compare(model, run, _LATER_PROMPTS, _LATER_NEW),
        "max_rows_in_flight rows are written part after part",
    )  # fmt: skip


def generates(model: Any) -> bool:
    """Whether the model's own ``generate`` agrees with one forward pass per text when prompts differ in length."""

    def run(prompts: Prompts, rule: NextToken, draws: Tensor, record: Record) -> None:
        generate(model, prompts, rule, draws, record, synced_gpus=False)

    return agrees(model, "generate()", lambda: _compare(model, run, _PROMPTS, _NEW), "")


def _compare(
    model: Any, run: Decode, lengths: tuple[int, ...], new: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    asked = probe_texts(model, lengths)
    device = asked[0].device
    prompts = Prompts.of([text.tolist() for text in asked], 1, 0, device)
    limit = torch.tensor(new, dtype=torch.int64, device=device)
    never = torch.tensor([text_config(model.config).vocab_size], dtype=torch.long, device=device)
    record = Record(limit, never, 0)
    run(prompts, NextToken(), uniforms(range(len(asked)), max(new)).to(device), record)
    texts = [torch.cat([prompt, row[:n]]) for prompt, row, n in zip(asked, record.tokens, new, strict=True)]
    alone = [_last_log_probs(model, text[None], [len(text)], [n]) for text, n in zip(texts, new, strict=True)]
    batched = _last_log_probs(model, side_by_side(texts), [len(text) for text in texts], list(new))
    return torch.cat([row[:n] for row, n in zip(record.log_prob, new, strict=True)]), torch.cat(alone), batched


def _last_log_probs(model: Any, tokens: Tensor, lengths: list[int], new: list[int]) -> Tensor:
    """Returns log π of the last tokens of each row, concatenated."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    values = F.token_log_probs(logits, tokens[:, 1:])
    return torch.cat([row[n - 1 - k : n - 1] for row, n, k in zip(values, lengths, new, strict=True)])
