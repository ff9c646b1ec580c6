"""The way in which a model's completions are decoded: the fastest that gives its own log-probabilities."""

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.fast import is_fast
from rl_modules.language.architecture import text_config, transformers_model
from rl_modules.language.fast.grouped_attention import can_group
from rl_modules.language.fast.held_graphs import held_cache, new_cache
from rl_modules.language.fast.self_check import agrees, probe_texts, side_by_side
from rl_modules.language.fast.shared_prompts import SharedPromptCache
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling.decode import Decoding, Prompts, Record
from rl_modules.language.sampling.draw import NextToken, uniforms
from rl_modules.language.sampling.own_generate import generate

#: Lengths of the self-check's prompts, and tokens that each is continued by. Two rows are decoded together: the third
#: begins beside the second, whose text is shorter.
_PROMPTS, _NEW, CHECKED_ROWS = (2, 1, 5), (2, 4, 2), 2
Decode = Callable[[Prompts, NextToken, Tensor, Record], None]
#: An empty cache for rows of so many tokens; None: the model's rows are more than keys and values of all tokens.
MakeCache = Callable[[int], RowCache | None]
#: Values of ``cache_implementation``; with the last two steps become graphs, the last is transformers' word.
CACHES = ("auto", "dynamic", "graph", "static")

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)


def cache_for(
    implementation: str, model: Any, longest: int, synced_gpus: bool, slots: int, share: float
) -> RowCache | None:
    """The fastest exact cache for ``slots`` rows of ``longest`` tokens; None: the model's own ``generate``."""
    network, device = transformers_model(model), next(model.parameters()).device
    graphs = wants_graphs(implementation, model)
    if graphs and synced_gpus:
        warn_once(
            f"cache_implementation={implementation} is for weights in one piece; sharded ones are decoded with "
            "cache_implementation=dynamic"
        )
    elif graphs and (grouped := groups(model, longest)) is not None:
        return held_cache(model, grouped, longest, slots, share)
    # Elsewhere sdpa is one fused kernel.
    shares = is_fast() and device.type == "cpu" and can_group(network)
    kinds: list[type[RowCache]] = [SharedPromptCache, RowCache] if shares else [RowCache]
    for kind in kinds:
        make = partial(kind.for_model, text_config(model.config))
        # Sharded ranks call the model equally often, whatever each of them needs to know.
        if (cache := make(longest)) is not None and (synced_gpus or decodes(model, make)):
            return cache
    if not synced_gpus and not generates(model):
        raise UsageError(
            f"{type(model).__name__} gives prompts of unequal length other log-probabilities when it "
            "decodes than when it reads them, so that nothing can be sampled from it; take another "
            "architecture"
        )
    warn_once(
        f"{type(model).__name__} keeps other things than keys and values of all tokens, so sampling "
        "goes through its generate(): prompts are not shared, rows that have ended stay, and "
        "max_rows_in_flight rows are written part after part"
    )
    return None


def wants_graphs(implementation: str, model: Any) -> bool:
    """Whether steps are to become graphs."""
    on_cuda = next(model.parameters()).device.type == "cuda"
    return is_fast() and (implementation in CACHES[2:] or (implementation == "auto" and on_cuda))


def groups(model: Any, longest: int) -> bool | None:
    """Whether the steps that become graphs attend by :mod:`grouped_attention`; None: no steps of this model do."""
    name = type(model).__name__
    if new_cache(model, False, longest, 1) is None:
        warn_once(f"{name} has no static cache here, so that cache_implementation=dynamic is taken")
        return None
    for grouped in (True, False) if can_group(transformers_model(model)) else (False,):
        instead = "its own attention is taken" if grouped else "cache_implementation=dynamic is taken"
        if decodes(model, partial(new_cache, model, grouped, slots=CHECKED_ROWS), instead):
            return grouped
    return None


def decodes(model: Any, make_cache: MakeCache, instead: str = "") -> bool:
    """Whether token-by-token decoding through a cache, in which a row takes the place of one that has ended, has the
    log-probabilities of one forward pass per text; else it says what is done ``instead``.
    """
    if (made := make_cache(max(_PROMPTS) + max(_NEW))) is None:
        return False

    def run(*of_decoding: Any) -> None:
        Decoding(model, made, *of_decoding).run(CHECKED_ROWS)

    what = f"decoding through a {type(made).__name__}{' with grouped keys' if getattr(made, 'grouped', False) else ''}"
    return agrees(model, what, lambda: _compare(model, run), instead)


def generates(model: Any) -> bool:
    """Whether the model's own ``generate`` agrees with one forward pass per text when prompts differ in length."""
    return agrees(model, "generate()", lambda: _compare(model, partial(generate, model)), "")


def _compare(model: Any, run: Decode) -> tuple[Tensor, Tensor, Tensor]:
    asked, new = probe_texts(model, _PROMPTS), _NEW
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
