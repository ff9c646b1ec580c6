"""Number of rows that are decoded together: the user's cap, or as many as fit into the device's free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.language.models import max_length, text_config

#: Share of the free memory that the cache may take; the rest is for activations and for the cache's growth by copying.
_SHARE = 0.4


def rows_in_flight(
    model: Any,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    max_completion_length: int,
    cap: int | None,
    synced_gpus: bool,
) -> int:
    """Rows to decode together, at least 1.

    Args:
        model: causal language model.
        prompts: P lists of token ids.
        num_generations: completions per prompt.
        max_completion_length: tokens per completion at most.
        cap: the user's; None: all rows, and on CUDA as many as fit.
        synced_gpus: use the smallest number of all ranks, because all must decode equally many parts.

    Raises:
        UsageError: the cap is below 1.
    """
    if cap is not None and cap < 1:
        raise UsageError(f"max_rows_in_flight={cap} must be at least 1, or null for as many as fit")
    rows = len(prompts) * num_generations
    device = next(model.parameters()).device
    if cap is None and device.type == "cuda":
        longest = min(max(map(len, prompts)) + max_completion_length, max_length(model.config))
        cap = max(1, int(_SHARE * free_memory(device)) // row_bytes(model, longest))
        if synced_gpus:
            least = torch.tensor(cap, dtype=torch.int64, device=device)
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
            cap = int(least)
    return rows if cap is None else min(rows, cap)


def row_bytes(model: Any, length: int) -> int:
    """Memory that one row takes while it is decoded: keys and values of its tokens in all layers, and its logits.

    Args:
        model: causal language model.
        length: tokens of the longest row, prompt included.
    """
    config = text_config(model.config)
    heads = getattr(config, "num_attention_heads", None)
    cache = 0  # of a model without attention, whose state does not grow with the text
    if heads is not None:
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        item = next(model.parameters()).element_size()
        cache = 2 * config.num_hidden_layers * key_heads * size * length * item
    # The draw holds the logits in float32, their softmax in float64 and its running sum.
    return cache + config.vocab_size * (4 + 8 + 8)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still get on a CUDA device, its own unused reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
