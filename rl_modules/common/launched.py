"""Training in ranks that a running process started: ``ddp_notebook``, ``ddp_fork`` and ``ddp_spawn``.

Lightning returns a rank's state dict to that process, which loads the parts that fit. The process has not built a
network and has no normaliser statistics, so it would silently evaluate new weights.
"""

import multiprocessing
from typing import Any

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


class ReturnsFromRanks:
    """Base of modules whose ranks return a checkpoint in place of their weights, as ``load_from_checkpoint`` needs."""

    _trainer: Any
    _has_returned = False
    #: Optimizer steps, and a control datamodule's metrics, at the end of a ``fit`` in ranks that this process started.
    reached: dict[str, Any] | None = None
    #: Optimizer steps and tokens of a language run at the start of the process that trains; above 0 if it resumed.
    began_at: tuple[int, int] = (0, 0)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights by name; to the process that started this rank, all that a checkpoint holds."""
        weights = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if args or kwargs or self._has_returned or not is_returning(self._trainer):
            return weights
        self._has_returned = True
        module: Any = self
        checkpoint = {"state_dict": dict(weights), "hyper_parameters": dict(module.hparams)}
        module.on_save_checkpoint(checkpoint)
        source: Any = getattr(self._trainer, "datamodule", None)
        metrics = source.metrics() if hasattr(source, "num_timesteps") else {}
        checkpoint["reached"] = {"global_step": self._trainer.global_step, "metrics": metrics,
                                 "began_at": self.began_at}  # fmt: skip
        return {CHECKPOINT: checkpoint}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads weights, or what a rank has returned."""
        if CHECKPOINT not in state_dict:
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        module: Any = self
        checkpoint = state_dict[CHECKPOINT]
        self.reached = checkpoint["reached"]
        self.began_at = checkpoint["reached"]["began_at"]
        # Custom networks are those given here: a file of weights, which may have this key, must not select one.
        kept = getattr(module, "own_networks", ())
        for name, value in checkpoint["hyper_parameters"].items():
            if module.hparams.get(name) is None and name not in kept:  # spaces, or a language model's description
                module.hparams[name] = value
        # Without a Trainer, as in `load_from_checkpoint`, because this process runs no `fit`.
        trainer, self._trainer = self._trainer, None
        try:
            module.configure_model()
            module.on_load_checkpoint(checkpoint)
            return module.load_state_dict(checkpoint["state_dict"])
        finally:
            self._trainer = trainer
