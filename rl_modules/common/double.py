"""Inputs of networks whose weights are float64, as ``precision=64-true`` makes them."""

from typing import Any

import torch
from torch import Tensor

from rl_modules.common.spaces import tree_map


def is_double(module: Any) -> bool:
    """Returns whether a module's weights are float64."""
    first: Tensor | None = next(iter(module.parameters()), None)
    return first is not None and first.dtype is torch.float64


def in_double(x: Any) -> Any:
    """Floating-point tensors as float64, in nested containers too; other tensors as they are."""
    return tree_map(lambda part: part.double() if part.is_floating_point() else part, x)
