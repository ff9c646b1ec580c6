"""Graphs of decoding that are held from one generation to the next, and the memory that they and rows may take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rl_modules.language.architecture import text_config
from rl_modules.language.fast.graphs import CastWeights, GraphCache, bucket, columns_for
from rl_modules.language.row_cache import RowCache


class _Held:
    """What a model's generations share: caches by their sizes, the least recently used first."""

    def __init__(self, traits: Hashable, casts: CastWeights | None) -> None:
        self.traits, self.casts = traits, casts
        #: By whether keys are grouped, slots and columns.
        self.caches: OrderedDict[tuple[bool, int, int], GraphCache] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self.caches.values()) + (0 if self.casts is None else self.casts.bytes)


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()
#: Models beside whose training graphs have been kept or released before.
_seen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def new_cache(model: Any, grouped: bool, longest: int, slots: int) -> GraphCache | None:
    """An empty cache that nobody holds; None: the model's rows are more than keys and values of all tokens."""
    found = RowCache.for_model(text_config(model.config), longest)
    return (
        None if found is None else GraphCache(len(found.layers), slots, columns_for(longest), _device(model), grouped)
    )


def held_cache(model: Any, grouped: bool, longest: int, slots: int, share: float) -> GraphCache:
    """A cache for so many rows or more, with graphs that still hold; ``share`` of the device's memory is kept."""
    held, traits = _held.get(model), _traits(model)
    if held is None or held.traits != traits:
        release(model)
        casts = CastWeights(model) if torch.is_autocast_enabled(_device(model).type) else None
        held = _held[model] = _Held(traits, casts)
    if held.casts is not None:
        held.casts.refresh()
    device, most, columns = _device(model), _most(model, share), columns_for(longest)
    # Rounds of dynamic sampling differ in their rows; a step's shapes are the same in a cache with further slots.
    fitting = (key for key in held.caches if key[::2] == (grouped, columns) and key[1] >= slots)
    key = min(fitting, default=(grouped, bucket(slots, least=8), columns))
    if key not in held.caches:
        layers = len(RowCache.for_model(text_config(model.config), longest).layers)  # type: ignore[union-attr]
        held.caches[key] = GraphCache(layers, key[1], columns, device, grouped)
        held.caches[key].most = most
        if held.casts is not None:
            held.caches[key].weights = held.casts.swapped
    held.caches.move_to_end(key)
    while len(held.caches) > 1 and held.bytes > most:
        held.caches.popitem(last=False)[1].clear()
    return held.caches[key]


def held_bytes(model: Any) -> int:
    """Memory that a model's graphs keep between two generations."""
    return 0 if model not in _held else _held[model].bytes


def held_copies() -> dict[Hashable, torch.Tensor]:
    """Room for cast weights that graphs keep, by layer, name and type; its numbers may be those before a step."""
    casts = [held.casts for held in _held.values() if held.casts is not None]
    return {(layer, name, copy.dtype): copy for cast in casts for layer, name, _, copy in cast.places}


def release(model: Any) -> None:
    """Frees a model's graphs and their tensors; the next generation captures them again."""
    if (held := _held.pop(model, None)) is not None:
        for cache in held.caches.values():
            cache.clear()


def make_room(model: Any, share: float) -> None:
    """Releases a model's graphs before a training step, unless earlier steps have shown that both fit."""
    if model not in _held:
        return
    device, held = _device(model), held_bytes(model)
    fits = False
    if device.type == "cuda" and _seen.get(model) and held <= _most(model, share):
        fits = torch.cuda.max_memory_allocated(device) + held < 0.9 * _most(model, 1.0)
    _seen[model] = True
    if not fits:
        release(model)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def _most(model: Any, share: float) -> float:
    device = _device(model)
    return share * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else torch.inf


def _traits(model: Any) -> Hashable:
    """What a graph depends on beyond the values of weights: where these are, and what the model's code does."""
    kind = _device(model).type
    modules = [
        (
            tuple(module._forward_hooks),
            tuple(module._forward_pre_hooks),
            getattr(module, "merged", None),
            # Of transformers' models it is a method, whose text is the whole model's.
            None if callable(active := getattr(module, "active_adapters", None)) else str(active),
            getattr(module, "disable_adapters", None),
        )
        for module in model.modules()
    ]
    tensors = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return hash((tuple(modules), tuple(tensors), autocast, model.config._attn_implementation))


# ---------------------------------------------------------------- rows that fit into the device's memory

#: Share of the free memory that the cache may take; the rest is for activations and for the cache's growth by copying.
_SHARE = 0.4


def rows_that_fit(model: Any, longest: int, synced_gpus: bool) -> int:
    """Rows of so many tokens that the free memory has room for, on every rank of sharded weights as many.

    A power of two or its half above it: free memory differs by a little each time, and graphs are for a number of rows.
    """
    device = _device(model)
    count = max(1, int(_SHARE * (free_memory(device) + held_bytes(model))) // row_bytes(model, longest))
    if synced_gpus:
        least = torch.tensor(count, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        count = int(least)
    power = 1 << count.bit_length() - 1
    return max(power, power * 3 // 2 * (count >= power * 3 // 2))


def row_bytes(model: Any, length: int) -> int:
    """Memory that one row takes while it is decoded: keys and values of its tokens in all layers, and its logits."""
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
