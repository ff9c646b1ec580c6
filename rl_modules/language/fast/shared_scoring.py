"""Log-probabilities of several completions per prompt, by a forward pass that reads each prompt once.

A group of G completions repeats its prompt G times. Here the prompts go through the model first; the completions then
read their keys and values, as in decoding, but with gradient. With 8 completions of 48 tokens to prompts of 48,
forward and backward pass take .55 of the operations and .64 of the processor's time; with 8 + 4 tokens .37 and .90.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rl_modules import functional as F
from rl_modules.fast import is_fast
from rl_modules.language.architecture import cache_argument, is_sharded, text_config
from rl_modules.language.fast.self_check import agrees, probe_texts, shortest_window, side_by_side
from rl_modules.language.row_cache import RowCache
from rl_modules.language.scoring import completion_log_probs, log_probs_at, placed

if TYPE_CHECKING:
    from rl_modules.language.sampling.support import Filter, Process

#: Share of repeated prompt tokens in a batch above which two passes without repetitions are faster than one with them.
WORTHWHILE = 0.2
#: Columns of the self-check's layout.
_SMALLEST = 8


def can_share(model: Any, width: int) -> bool:
    """Whether completions need only the prompt's keys and values, also for gradients, in ``width`` columns."""
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    window = shortest_window(model.config)
    # A compiled layer would be compiled for each layer's place in the cache.
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    # Sharded ranks must call the model equally often, whatever rows each has. Other attention kernels treat masks
    # differently.
    return (
        is_fast()
        and not (checkpointing or compiled or is_sharded(model))
        and model.config._attn_implementation.startswith(("sdpa", "eager"))
        and (window is None or window >= max(width, _SMALLEST))
        and RowCache.for_model(text_config(model.config), longest=width) is not None
        and agrees(model, "reading each prompt once", lambda: _compare(model), "each completion is read with its own")
    )


def _compare(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of four completions of two prompts, of unequal lengths, in a layout of 8 columns."""
    first, second, *endings = probe_texts(model, [4, 2, 1, 4, 3, 2])
    texts = [
        torch.cat([first, endings[0]]),
        torch.cat([first, endings[1]]),
        torch.cat([second, endings[2]]),
        torch.cat([second, endings[3]]),
    ]
    tokens = side_by_side(texts)
    lengths = torch.tensor([4, 4, 2, 2], device=tokens.device), torch.tensor([1, 4, 3, 2], device=tokens.device)
    group = torch.tensor([0, 0, 1, 1], device=tokens.device)
    shared, _ = grouped_log_probs(model, tokens, *lengths, group)
    batched, _ = completion_log_probs(model, tokens, *lengths)
    alone = torch.zeros_like(batched)
    for i, (text, start) in enumerate(zip(texts, (4, 4, 2, 2), strict=True)):
        logits = model(input_ids=text[None], use_cache=False).logits[:, start - 1 : -1]
        alone[i, : len(text) - start] = F.token_log_probs(logits, text[None, start:])[0]
    return shared, alone, batched


def shared_log_probs(
    model: Any, tokens: Tensor, prompt_length: Tensor, length: Tensor, group: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor | None] | None:
    """:func:`grouped_log_probs` if that saves enough work; None: it does not, or the model can't."""
    if group is None or not is_fast():
        return None
    on_host = torch.stack([prompt_length, length, group]).cpu()
    if repeated_share(*on_host) < WORTHWHILE:
        return None
    width = int(on_host[0].max() + on_host[1].max())  # of the layout: the longest prompt, then the longest completion
    return _grouped(model, tokens, prompt_length, length, on_host, *options) if can_share(model, width) else None


def repeated_share(prompt_length: Tensor, length: Tensor, group: Tensor) -> float:
    """Returns the share of a batch's tokens that a pass saves if it reads each prompt once."""
    first = _first_rows(group)[1]
    return float(1 - (prompt_length[first].sum() + length.sum()) / (prompt_length + length).sum())


def grouped_log_probs(
    model: Any,
    tokens: Tensor,
    prompt_length: Tensor,
    length: Tensor,
    group: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    filtered: Filter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``completion_log_probs`` of rows of which those with equal numbers in ``group`` [b] have the same prompt."""
    on_host = torch.stack([prompt_length, length, group]).cpu()
    return _grouped(model, tokens, prompt_length, length, on_host, temperature, entropy, filtered)


def _grouped(
    model: Any,
    tokens: Tensor,
    prompt_length: Tensor,
    length: Tensor,
    on_host: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    filtered: Filter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same; prompt lengths, lengths and groups are also on the host, [3, b], so that no shape is waited for."""
    prompts, lengths, group = on_host
    width, prompt_width, device = int(lengths.max()), int(prompts.max()), tokens.device
    first, source = _first_rows(group)[::-1]
    last = torch.arange(len(first)) * prompt_width + prompts[first] - 1
    first, source, last = (x.to(device, non_blocking=True) for x in (first, source, last))
    rows = torch.arange(len(length), device=device)
    cache: Any = DynamicCache(config=text_config(model.config))
    cached: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    beginning = tokens[rows, prompt_length]

    def process(row: Tensor, column: Tensor) -> Process | None:
        return None if filtered is None else filtered.at(tokens, prompt_length, row, column)

    found = [
        log_probs_at(
            model,
            last,
            beginning,
            temperature,
            entropy,
            source=source,
            process=process(rows, torch.zeros_like(rows)),
            input_ids=tokens[first, :prompt_width],
            **cached,
        )
    ]
    where = [rows * width]
    if width > 1:
        # The last token of a completion predicts no counted token.
        columns = torch.arange(width - 1, device=length.device)
        place = prompt_length.unsqueeze(1) + torch.minimum(columns, length.unsqueeze(1) - 1)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.index_select(0, source), layer.values.index_select(0, source)
        seen = torch.arange(prompt_width, device=length.device) < prompt_length.unsqueeze(1)
        mask = None if bool((prompts == prompt_width).all()) else torch.cat([seen, seen.new_ones(place.shape)], 1)
        counted = (torch.arange(width - 1) < lengths.unsqueeze(1) - 1).nonzero().to(device, non_blocking=True)
        row, column = counted.unbind(1)
        if len(row):
            found.append(
                log_probs_at(
                    model,
                    row * (width - 1) + column,
                    tokens[row, prompt_length[row] + column + 1],
                    temperature,
                    entropy,
                    process=process(row, column + 1),
                    input_ids=tokens.gather(1, place),
                    attention_mask=mask,
                    position_ids=place,
                    **cached,
                )
            )
            where.append(row * width + column + 1)
    shape = torch.Size([len(length), width])
    log_prob = placed(torch.cat([part.log_prob[0] for part in found]), torch.cat(where), shape)
    if not entropy:
        return log_prob, None
    spread = torch.cat([part.entropy[0] for part in found if part.entropy is not None])
    return log_prob, placed(spread, torch.cat(where), shape)


def _first_rows(group: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's prompt, [b] in [0, U), and the first row of each prompt, [U]."""
    names, source = group.unique(return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    first = torch.full_like(names, len(group)).scatter_reduce(0, source, rows, "amin")
    return source, first
