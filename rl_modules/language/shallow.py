"""Reduces a model to its first layers, for checks whose result depends only on the kinds of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rl_modules.language.models import text_config
from rl_modules.language.sharding import is_sharded

#: Names of the list of blocks in transformers' models.
_BLOCKS = ("layers", "h", "blocks")
#: Attributes that number layers.
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")


def body_of(network: Any) -> nn.Module:
    """Returns the part of a transformers model that holds its blocks."""
    body: nn.Module = network.get_decoder() if hasattr(network, "get_decoder") else network.base_model
    return body


def blocks_of(body: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Returns a model's blocks and the name of the attribute that holds them; None: they were not found."""
    for name in _BLOCKS:
        found = getattr(body, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return name, found
    return None


@contextmanager
def first_layers(model: Any) -> Iterator[bool]:
    """Inside, the model has only its first layers: as many as hold every kind of layer and end with the last one's.

    A self-check reads all weights of a model in each pass. A model's layers repeat a few kinds, so the first ones give
    the same result in a tenth of the time. The layers are the model's own, not copies.

    Args:
        model: of transformers, with adapters or without, in one piece.

    Yields:
        Whether layers were left out.
    """
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    body, config = body_of(network), text_config(network.config)
    found = None if is_sharded(model) else blocks_of(body)
    kinds = None if found is None else getattr(config, "layer_types", None)
    depth = None if found is None else _depth(found[1])
    if found is None or depth is None or getattr(config, "num_hidden_layers", None) != len(found[1]):
        yield False
        return
    name, blocks = found
    setattr(body, name, nn.ModuleList(list(blocks[:depth])))
    config.num_hidden_layers = depth
    if kinds is not None:
        config.layer_types = list(kinds[:depth])
    try:
        yield True
    finally:
        setattr(body, name, blocks)
        config.num_hidden_layers = len(blocks)
        if kinds is not None:
            config.layer_types = kinds


def _depth(blocks: nn.ModuleList) -> int | None:
    """How many layers hold every kind and end with the last one's; None: nearly all."""
    kinds = [_kind(block) for block in blocks]
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    complete = max(max(first.values()), 1)
    depth = next(i for i in range(complete, len(kinds)) if kinds[i] == kinds[-1]) + 1 if len(kinds) > 1 else 1
    return depth if 2 * depth <= len(kinds) else None


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What tells layers of different kinds apart: modules, their settings, and the shapes of their weights."""
    settings = tuple(
        (name, type(module).__name__, tuple(sorted(
            (key, str(value)) for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | type(None)) and key not in _NUMBERS and key != "training"
        )))
        for name, module in block.named_modules()
    )  # fmt: skip
    return settings, tuple((name, weight.shape) for name, weight in block.named_parameters())
