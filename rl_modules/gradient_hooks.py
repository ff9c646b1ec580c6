"""Lightning's hooks around a gradient, for algorithms that compute their gradients themselves."""

import lightning as L
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer


class GradientHooks:
    """Calls ``on_after_backward`` and ``on_before_optimizer_step`` of the module and the callbacks.

    Under automatic optimization Lightning calls them. The objects that define them are looked up once, because updates
    are short.

    Args:
        trainer: the Trainer of the run.
    """

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
