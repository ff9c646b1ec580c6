"""What every way of sampling with a model checks and prepares, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError, at_least
from rl_modules.common.modules import uncompiled
from rl_modules.language.architecture import max_length, text_config
from rl_modules.language.fast.held_graphs import release, rows_that_fit
from rl_modules.language.sampling.decode import Record
from rl_modules.language.sampling.protocol import Completions


def check_request(
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    max_completion_length: int,
    stops: list[int],
    seeds: Sequence[int] | Tensor,
    longest: int,
    words: int,
) -> None:
    """Refuses requests that no sampler can fulfil: ``longest`` tokens fit into the model, of ``words`` words."""
    rows = len(prompts) * num_generations
    mistakes = {
        "prompts is empty; give at least one list of token ids": len(prompts) == 0,
        f"num_generations={num_generations} must be 1 or more": num_generations < 1,
        f"max_completion_length={max_completion_length} must be 1 or more": max_completion_length < 1,
        "eos_token_id is empty; give at least one token that ends a completion": not stops,
        f"seeds has {len(seeds)} numbers, but {len(prompts)} prompts and num_generations={num_generations} make {rows} "
        "rows; give one seed per row": len(seeds) != rows,
    }
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            mistakes[f"prompt {i} is empty; give it at least one token, such as the tokenizer's BOS"] = True
        elif len(prompt) >= longest:
            mistakes[
                f"prompt {i} has {len(prompt)} tokens, the model takes {longest} with at least one of them new; "
                "shorten the prompt, or leave it out"
            ] = True
        elif not 0 <= min(prompt) <= max(prompt) < words:
            mistakes[
                f"prompt {i} has a token id outside of [0, {words}), the model's vocabulary; use the tokenizer "
                "that the model was trained with"
            ] = True
    for sentence, is_made in mistakes.items():
        if is_made:
            raise UsageError(sentence)


def rows_in_flight(
    model: Any,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    max_completion_length: int,
    cap: int | None,
    synced_gpus: bool,
) -> int:
    """Rows to decode together, at least 1."""
    if cap is not None:
        at_least("max_rows_in_flight", cap)
    rows = len(prompts) * num_generations
    if cap is None and next(model.parameters()).device.type == "cuda":
        longest = min(max(map(len, prompts)) + max_completion_length, max_length(model.config))
        cap = rows_that_fit(model, longest, synced_gpus)
    return rows if cap is None else min(rows, cap)


@contextmanager
def plain_layers(model: Any) -> Iterator[None]:
    """Turns off compiled layers, and the balance loss of experts, which fails if a mask is longer than the tokens."""
    config = text_config(model.config)
    asked = getattr(config, "output_router_logits", False)
    if asked:
        config.output_router_logits = False
    try:
        with uncompiled(model):
            yield
    finally:
        if asked:
            config.output_router_logits = asked


def completions_from(record: Record, model: Any) -> Completions:
    """Returns what was written; refuses NaN."""
    broken, longest = torch.stack([record.log_prob.isnan().any(), record.length.max()]).tolist()
    if broken:
        release(model)  # its keys and values may be NaN, which no mask hides from a later generation
        raise FloatingPointError("the model's logits are NaN: training has diverged, or float16 has overflown")
    tokens, log_prob = record.tokens[:, :longest].clone(), record.log_prob[:, :longest].clone()
    kept, count = record.kept() if record.keeps else (None, None)
    count = None if count is None else count[:, :longest].clone()
    return Completions(tokens, log_prob, record.length, record.finished, kept=kept, kept_count=count)
