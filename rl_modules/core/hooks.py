"""Where this project's work at Lightning's hooks stands. It is done whether or not a subclass's hook of the same name
calls ``super()``: in a plain LightningModule the inherited hook does nothing.

Each family has one callback, :class:`rl_modules.run.ControlLoop` or :class:`rl_modules.language.loop.LanguageLoop`,
whose methods are the order of what happens at a hook; ``setup`` adds it, because a subclass may override
``configure_callbacks``. Lightning gives callbacks no place before a checkpoint is loaded, none at a datamodule's hooks,
and none between a module's hook and the callbacks that monitor its metrics. Only there hooks are framed: those of
:data:`BEFORE` and :data:`AFTER`, by methods with the hook's name after an underscore.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rl_modules.core.checkpoint_file import read_checkpoint, require_plain

if TYPE_CHECKING:
    from rl_modules.algorithm import Algorithm


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


# ---------------------------------------------------------------- Lightning's loops, as of Lightning 2.6


def copy_for_averages(module: "Algorithm") -> None:
    """Makes ``StochasticWeightAveraging`` copy a module that was just built, because its ``setup`` ran before."""
    trainer: Any = module.trainer  # of which Lightning declares no callbacks
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            callback.setup(trainer, module, "fit")


def is_cut_off(trainer: L.Trainer) -> bool:
    """Whether a run that resumes has batches left in the last epoch: a limit or a callback has stopped it there.

    A source of experience that is complete has none, wherever its epoch ended.
    """
    is_complete = getattr(getattr(trainer, "datamodule", None), "is_complete", False)
    return not (is_complete or trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def draw_over(trainer: L.Trainer, position: int) -> None:
    """Sets the x-axis of what Lightning and its callbacks log by themselves: theirs counts batches with a step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = position


class CheckedCheckpointIO(TorchCheckpointIO):
    """Verifies a file by :func:`rl_modules.core.checkpoint_file.read_checkpoint` before Lightning loads it, and
    refuses to write one that could not be loaded.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:

        require_plain(checkpoint)
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:

        if "://" not in str(path):
            read_checkpoint(path, "ckpt_path", ("state_dict", "pytorch-lightning_version"))
        where: Any = map_location or "cpu"
        return super().load_checkpoint(path, where, weights_only=True)

    @classmethod
    def install(cls, trainer: Any) -> None:
        """Replaces Lightning's own reader and writer of a Trainer; a user's stays."""
        # Some strategies read checkpoints in their own way and have no `checkpoint_io`.
        with suppress(NotImplementedError):
            if type(trainer.strategy.checkpoint_io) in (TorchCheckpointIO, CheckedCheckpointIO):
                trainer.strategy.checkpoint_io = cls()
