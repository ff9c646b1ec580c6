"""Training in ranks that a running process started: ``ddp_notebook``, ``ddp_fork`` and ``ddp_spawn``.

Lightning returns a rank's state dict to that process, which loads the parts that fit. The process has not built a
network and has no normaliser statistics, so it would silently evaluate new weights.
"""

import multiprocessing

from lightning import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

#: Key of the checkpoint in a returned state dict.
CHECKPOINT = "checkpoint_of_rank"


def launches(trainer: Trainer) -> bool:
    """Returns whether this process starts the ranks of each ``fit``, which end with it."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def is_returning(trainer: Trainer | None) -> bool:
    """Returns whether this process is a rank that another process started, and its ``fit`` has ended."""
    return (
        trainer is not None
        and trainer.state.fn == TrainerFn.FITTING
        and trainer.state.finished
        and launches(trainer)
        and multiprocessing.parent_process() is not None
    )
