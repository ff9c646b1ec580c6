"""Gradients of some of a module's parameters, for algorithms that compute their gradients themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer


def trainable(module: nn.Module) -> list[Any]:
    """Returns the parameters of a module that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a loss."""
    if not parameters:
        return ()
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def averaged(
    parameters: Sequence[Tensor], found: Sequence[Tensor | None], mean: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Averages gradients over ranks."""
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


class GradientHooks:
    """Calls the gradient hooks of module and callbacks, as Lightning does under automatic optimization."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self._follows_backward = _is_defined(trainer, "on_after_backward")
        self._precedes_step = _is_defined(trainer, "on_before_optimizer_step")

    def after_backward(self) -> None:
        """Call this when the parameters have their gradients."""
        if self._follows_backward:
            _call(self.trainer, "on_after_backward")

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call this before each step of an optimizer."""
        if self._precedes_step:
            _call(self.trainer, "on_before_optimizer_step", optimizer)


def _is_defined(trainer: L.Trainer, name: str) -> bool:
    listeners = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(is_overridden(name, listener) for listener in listeners)


def _call(trainer: L.Trainer, name: str, *args: Optimizer) -> None:
    # Callbacks before the module, as under automatic optimization.
    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)
