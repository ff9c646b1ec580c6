"""Whether a way of decoding gives a model's own log-probabilities: see :mod:`rl_modules.language.self_check`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.models import text_config
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling.decode import Prompts, Record, decode, generate
from rl_modules.language.sampling.draw import NextToken, uniforms
from rl_modules.language.self_check import agrees, probe_texts, side_by_side

#: Lengths of the self-check's prompts, and tokens that each is continued by.
_PROMPTS = (4, 2, 1)
_NEW = 3
Decode = Callable[[Prompts, NextToken, Tensor, Record], None]


def decodes(model: Any, make_cache: Callable[[int], RowCache | None]) -> bool:
    """Whether token-by-token decoding through a :class:`RowCache` agrees with one forward pass per text.

    Args:
        model: causal language model.
        make_cache: an empty cache for rows of that many tokens, or None.
    """
    cache = make_cache(max(_PROMPTS) + _NEW)
    if cache is None:
        return False

    def run(prompts: Prompts, rule: NextToken, draws: Tensor, record: Record) -> None:
        decode(model, cache, prompts, rule, draws, record, synced_gpus=False)

    return agrees(model, f"decoding through a {type(cache).__name__}", lambda: _compare(model, run), "")


def generates(model: Any) -> bool:
    """Whether the model's own ``generate`` agrees with one forward pass per text when prompts differ in length."""

    def run(prompts: Prompts, rule: NextToken, draws: Tensor, record: Record) -> None:
        generate(model, prompts, rule, draws, record, synced_gpus=False)

    return agrees(model, "generate()", lambda: _compare(model, run), "")


def _compare(model: Any, run: Decode) -> tuple[Tensor, Tensor, Tensor]:
    asked = probe_texts(model, _PROMPTS)
    device = asked[0].device
    prompts = Prompts.of([text.tolist() for text in asked], 1, 0, device)
    limit = torch.full((len(asked),), _NEW, dtype=torch.long, device=device)
    never = torch.tensor([text_config(model.config).vocab_size], dtype=torch.long, device=device)
    record = Record(limit, never, 0)
    run(prompts, NextToken(), uniforms(range(len(asked)), _NEW).to(device), record)
    texts = [torch.cat([prompt, written]) for prompt, written in zip(asked, record.tokens, strict=True)]
    alone = torch.cat([_last_log_probs(model, text[None], [len(text)]) for text in texts])
    rows = side_by_side(texts)
    return record.log_prob, alone, _last_log_probs(model, rows, [len(text) for text in texts])


def _last_log_probs(model: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Log π of each row's last ``_NEW`` tokens, [b, _NEW]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    values = F.token_log_probs(logits, tokens[:, 1:])
    return torch.stack([row[n - 1 - _NEW : n - 1] for row, n in zip(values, lengths, strict=True)])
