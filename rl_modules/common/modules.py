"""Modules: training and evaluation mode, compiled ones; and nested containers of tensors."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets modules to evaluation mode within the context, faster than ``Module.eval``, and restores each mode."""
    parts = [part for part in modules if part.training]
    for part in parts:
        part.__dict__["training"] = False
    try:
        yield
    finally:
        for part in parts:
            part.__dict__["training"] = True


def is_double(module: nn.Module) -> bool:
    """Returns whether a module's weights are float64."""
    first: Tensor | None = next(iter(module.parameters()), None)
    return first is not None and first.dtype is torch.float64


def in_double(x: Any) -> Any:
    """Floating-point tensors as float64, in nested containers too; other tensors as they are."""
    return tree_map(lambda part: part.double() if part.is_floating_point() else part, x)


def tree_map(function: Any, tree: Any, *others: Any) -> Any:
    """Applies ``function`` to the leaves of equally nested dictionaries."""
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    return function(tree, *others)


def tree_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of nested dictionaries, in order."""
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in tree_leaves(part)]
    return [tree]


def on(device: torch.device, numbers: list[int]) -> Tensor:
    """Integers on a device, without waiting for it."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Runs compiled layers as they are: each new form of a batch would be compiled anew."""
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
