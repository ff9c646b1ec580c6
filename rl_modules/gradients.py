"""Gradients of some of a module's parameters, for algorithms that compute their gradients themselves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def trainable(module: nn.Module) -> list[Any]:
    """The parameters of a module that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gradients(loss: Tensor, parameters: Sequence[Tensor], zeros: bool = False) -> tuple[Any, ...]:
    """The gradients of a loss.

    Args:
        loss: a scalar.
        parameters: which; none: all are frozen.
        zeros: what a parameter gets that the loss does not depend on: zeros, or None, with which an optimizer leaves it
            as it is. Ranks average tensors of one size, so they take zeros.
    """
    if not parameters:
        return ()
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=zeros)
