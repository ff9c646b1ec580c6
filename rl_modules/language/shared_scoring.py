"""Log-probabilities of several completions per prompt, by a forward pass that reads each prompt once.

A group of G completions repeats its prompt G times. Here the prompts go through the model first; the completions then
read their keys and values, as in decoding, but with gradient.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rl_modules import functional as F
from rl_modules.language.logits import logits_at
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sharding import is_sharded

#: Share of a batch's tokens that must be repeated prompts for two passes over less to be better than one over all.
WORTHWHILE = 0.2


def can_share(model: Any, longest: int) -> bool:
    """Whether a model's keys and values of a prompt are all that its completions need, with gradient.

    Args:
        model: causal language model.
        longest: tokens of the longest row.
    """
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    plain = RowCache.for_model(model.config.get_text_config(decoder=True), longest=longest) is not None
    # Sharded ranks go through the model equally often, whatever rows each has. Other kernels than these have rules of
    # their own about masks.
    return (
        plain and not checkpointing and not is_sharded(model) and model.config._attn_implementation in ("sdpa", "eager")
    )


def repeated_share(prompt_length: Tensor, length: Tensor, group: Tensor) -> float:
    """How much of a batch's tokens a pass that reads each prompt once leaves out."""
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
) -> tuple[Tensor, Tensor | None]:
    """Log π of every completion token, as ``completion_log_probs`` has them.

    Args:
        model: causal language model that :func:`can_share`.
        tokens: prompts and completions, right-padded, [b, T].
        prompt_length: [b], ≥ 1.
        length: tokens of the completions, [b], ≥ 1.
        group: [b]; rows with equal numbers have the same prompt.
        temperature: T, the one that the tokens were sampled with.
        entropy: also return the entropies (without gradient).

    Returns:
        log π(y_j) in nats, [b, L] float32, 0 behind each completion's end; and H_j in nats, likewise, or None.
    """
    source, first = _first_rows(group)
    rows, width = torch.arange(len(length), device=length.device), int(length.max())
    prompt_width = int(prompt_length.max())
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    last = torch.arange(len(first), device=first.device) * prompt_width + prompt_length[first] - 1
    before = logits_at(model, last, input_ids=tokens[first, :prompt_width], past_key_values=cache, use_cache=True)
    logits = [before[:, source]]
    row, column = [rows], [torch.zeros_like(rows)]
    if width > 1:
        # The last token of a completion predicts nothing that counts.
        columns = torch.arange(width - 1, device=length.device)
        place = prompt_length.unsqueeze(1) + torch.minimum(columns, length.unsqueeze(1) - 1)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.index_select(0, source), layer.values.index_select(0, source)
        seen = torch.arange(prompt_width, device=length.device) < prompt_length.unsqueeze(1)
        mask = None if bool(seen.all()) else torch.cat([seen, seen.new_ones(place.shape)], 1)
        counted = columns < length.unsqueeze(1) - 1
        within = logits_at(
            model, counted.flatten().nonzero().squeeze(1), input_ids=tokens.gather(1, place), attention_mask=mask,
            past_key_values=cache, position_ids=prompt_length.unsqueeze(1) + columns, use_cache=True
        )  # fmt: skip
        logits.append(within)
        at = counted.nonzero()
        row.append(at[:, 0])
        column.append(at[:, 1] + 1)
    where = torch.cat(row) * width + torch.cat(column)
    target = tokens[torch.cat(row), prompt_length[torch.cat(row)] + torch.cat(column)]
    parts = target.unsqueeze(0).split([len(part) for part in row], 1)
    values = [F.token_log_probs(z, y, temperature) for z, y in zip(logits, parts, strict=True)]
    log_prob = _placed(torch.cat(values, 1), where, length, width)
    if not entropy:
        return log_prob, None
    spread = torch.cat([F.token_entropy(z.detach(), temperature) for z in logits], 1)
    return log_prob, _placed(spread, where, length, width)


def _first_rows(group: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's prompt, [b] in [0, U), and the first row of each prompt, [U]."""
    names, source = group.unique(return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    first = torch.full_like(names, len(group)).scatter_reduce(0, source, rows, "amin")
    return source, first


def _placed(values: Tensor, where: Tensor, length: Tensor, width: int) -> Tensor:
    flat = values.new_zeros(len(length) * width).index_copy(0, where, values.squeeze(0))
    return flat.view(len(length), width)
