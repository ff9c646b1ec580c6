"""This project's parts of Lightning's hooks. They run before a subclass's hook of the same name, which needs no
``super()``: in a plain LightningModule the inherited hook does nothing.

A part has the hook's name after an underscore, such as ``_on_train_start``. During a run, a callback calls the module's
parts; ``setup`` adds it, because a subclass may override ``configure_callbacks``. Lightning gives callbacks no place
before a checkpoint is loaded, none at a datamodule's hooks, and none between a module's hook and the callbacks that
monitor its metrics. The hooks of :data:`BEFORE` and :data:`AFTER` are therefore framed.
"""

import functools
from collections.abc import Callable
from typing import Any

import lightning as L

#: Framed hooks whose part runs before them.
BEFORE = ("setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint")
#: Framed hooks after which ``_after_<hook>`` runs. It writes the points of the curves with what the hook has recorded.
AFTER = ("on_train_batch_end", "on_train_epoch_end")


class OfRun(L.Callback):
    """A callback that is in the Trainer during a run only, after the others."""

    def teardown(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")


class Parts(OfRun):
    """Calls a module's parts."""

    def __init__(self, module: Any) -> None:
        for part in dir(type(module)):
            if part.startswith("_on_") and hasattr(L.Callback, part[1:]) and part[1:] not in BEFORE:
                setattr(self, part[1:], functools.partial(_call, part))


def _call(part: str, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
    getattr(module, part)(*args)


def frame(cls: Any) -> None:
    """Frames the hooks of a class of modules or datamodules."""
    for name in (*BEFORE, *AFTER):
        part = f"_{name}" if name in BEFORE else f"_after_{name}"
        hook = getattr(cls, name, None)
        if hook is not None and hasattr(cls, part) and not hasattr(hook, "framed"):
            setattr(cls, name, _framed(hook, part, name in BEFORE))


class HasParts:
    """Base of datamodules, which frames their hooks."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        frame(cls)


def _framed(hook: Callable[..., None], part: str, is_first: bool) -> Callable[..., None]:
    """Runs a part before or after a hook; not again where a subclass's hook calls this one by ``super()``."""

    @functools.wraps(hook)
    def frame(self: Any, *args: Any, **kwargs: Any) -> None:
        running = self.__dict__.setdefault("_hooks_running", set())
        if part in running:
            hook(self, *args, **kwargs)
            return
        running.add(part)
        try:
            if is_first:
                getattr(self, part)(*args, **kwargs)
            hook(self, *args, **kwargs)
        finally:
            running.remove(part)
        if not is_first:
            getattr(self, part)()

    frame.framed = hook  # type: ignore[attr-defined]
    return frame
