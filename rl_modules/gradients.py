"""Gradients of some of a module's parameters, for algorithms that compute their gradients themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def trainable(module: nn.Module) -> list[Any]:
    """Returns the parameters of a module that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a loss.

    Args:
        loss: a scalar.
        parameters: which; none: all are frozen.

    Returns:
        One gradient per parameter; None if the loss does not depend on it, so that the optimizer leaves it unchanged.
    """
    if not parameters:
        return ()
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def averaged(
    parameters: Sequence[Tensor], found: Sequence[Tensor | None], mean: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Averages gradients over ranks.

    Args:
        parameters: whose gradients they are; none: nothing is averaged.
        found: this rank's, as :func:`gradients` returns them.
        mean: returns the mean of a tensor over ranks; all ranks call it together.

    Returns:
        One gradient per parameter; None if no rank has one, because with zeros the optimizer's momentum would still
        move the parameter.
    """
    if not parameters:
        return []
    first = parameters[0]
    known = torch.tensor([float(g is not None) for g in found], dtype=first.dtype).to(first.device, non_blocking=True)
    parts = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in zip(parameters, found, strict=True)]
    *flat, known = mean(torch.cat([*parts, known])).split([*(p.numel() for p in parameters), len(parameters)])
    means = [part.view_as(p) for part, p in zip(flat, parameters, strict=True)]
    if all(g is not None for g in found):
        return means  # without a wait for the device
    return [part if is_known else None for part, is_known in zip(means, known.tolist(), strict=True)]
