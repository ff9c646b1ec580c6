"""The one base of all algorithms, in control and in language: arguments, hooks, checkpoints, ranks and curves."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor

from rl_modules.common.arguments import OWN_NETWORKS
from rl_modules.common.errors import UsageError, at_least
from rl_modules.core.checkpoint import load_run, restored_arrays, save_run
from rl_modules.core.checkpoint_file import loading
from rl_modules.core.curves import Means
from rl_modules.core.hooks import CheckedCheckpointIO, OfRun, frame
from rl_modules.core.resume import accumulated_gradients, finish_batch, resume_training
from rl_modules.core.settings import Declared
from rl_modules.core.state import GlobalGenerators, Stateful, declared, forget_state, persistent, transient
from rl_modules.ranks import is_returning

#: Key of the checkpoint in the state dict that a rank returns to the process that started it.
CHECKPOINT = "checkpoint_of_rank"


class Run(Stateful):
    """What a run needs beside the state that its algorithm declares; a new one begins with each fit."""

    #: Global norm of the last gradient before it was clipped; None where nothing is clipped.
    grad_norm: Tensor | None = persistent()
    #: Gradients of the unfinished step in the loaded checkpoint, until training resumes.
    gradients: dict[str, Tensor] = transient({})
    generators: GlobalGenerators = transient(lambda run: GlobalGenerators())
    #: Whether a checkpoint was loaded, and whether this fit's training has begun.
    resumes: bool = transient(False)
    has_begun: bool = transient(False)
    #: Optimizer steps and tokens of a language run at the start of the process that trains; above 0 if it resumed.
    began_at: tuple[int, int] = transient((0, 0))
    #: Optimizer steps, and a control datamodule's metrics, at the end of a ``fit`` in ranks that this process started.
    reached: dict[str, Any] | None = transient()


class Algorithm(Declared, L.LightningModule):
    """Base of all algorithms; a subclass defines ``training_step``."""

    run: Run = transient(lambda m: Run())
    #: The training metric that shows first whether the algorithm learns.
    learning_curve = "rollout/ep_rew_mean"
    #: Whether each rank's gradients of an unfinished step are stored, instead of their mean.
    stores_own_gradients = True
    # What was recorded since the last point of the curves.
    _means: Means = persistent(lambda m: Means())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        frame(cls)

    def __getstate__(self) -> dict[str, Any]:
        passing = set(declared(self, kept=False))
        return {name: value for name, value in super().__getstate__().items() if name not in passing}

    @property
    def is_fitting(self) -> bool:
        """Whether a ``fit`` is running."""
        return self._trainer is not None and self._trainer.state.fn == "fit"

    @property
    def place(self) -> int:
        """The place on the curves' x-axis: transitions in control, optimizer steps in language."""
        return self.trainer.global_step

    def begin_run(self) -> None:
        """Resets the state of a run, at the start of each ``fit``, before a checkpoint is loaded; weights stay."""
        forget_state(self)

    def gradients_so_far(self) -> dict[str, Tensor]:
        """Returns the gradients of an unfinished optimizer step by parameter, on the CPU; empty between steps."""
        return {name: gradient.cpu().clone() for name, gradient in accumulated_gradients(self).items()}

    # ---------------------------------------------------------------- parts of hooks

    def _setup(self, stage: str) -> None:
        trainer: Any = self._trainer
        at_least("trainer.accumulate_grad_batches", trainer.accumulate_grad_batches)
        CheckedCheckpointIO.install(trainer)
        trainer.callbacks = [*trainer.callbacks, self.make_loop()]

    def make_loop(self) -> OfRun:
        """Returns the callback that does this family's work at the hooks of a run."""
        raise NotImplementedError

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:

        save_run(self, checkpoint)

    def _on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:

        load_run(self, checkpoint)

    def _require_own(self, checkpoint: dict[str, Any]) -> None:
        saved, here = checkpoint.get("algorithm"), type(self).__name__
        if saved != here:
            raise UsageError(
                f"the checkpoint holds {saved or 'no algorithm of this project'}, not {here}; load it with that class"
            )

    # ---------------------------------------------------------------- ranks that this process started

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights by name; to the process that started this rank, all that a checkpoint holds."""
        weights = super().state_dict(*args, **kwargs)
        if args or kwargs or "_has_returned" in self.__dict__ or not is_returning(self._trainer):
            return weights
        self.__dict__["_has_returned"] = True
        return {CHECKPOINT: self._returned(weights)}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads weights, or what a rank has returned."""
        if CHECKPOINT not in state_dict:
            return super().load_state_dict(state_dict, strict, assign)
        return self._take_returned(state_dict[CHECKPOINT])

    def _returned(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Returns all that a checkpoint holds, and what the run has reached."""
        checkpoint = {"state_dict": dict(weights), "hyper_parameters": dict(self.hparams)}
        self.on_save_checkpoint(checkpoint)
        source: Any = getattr(self._trainer, "datamodule", None)
        metrics = source.metrics() if hasattr(source, "num_timesteps") else {}
        step = self.trainer.global_step
        return {**checkpoint, "reached": {"global_step": step, "metrics": metrics, "began_at": self.run.began_at}}

    def _take_returned(self, checkpoint: dict[str, Any]) -> Any:
        """Loads what a rank has returned; this process has built no network."""
        self.run.reached = checkpoint["reached"]
        self.run.began_at = checkpoint["reached"]["began_at"]
        # Custom networks are those given here: a file of weights, which may have this key, must not select one.
        for name, value in checkpoint["hyper_parameters"].items():
            if self.hparams.get(name) is None and name not in OWN_NETWORKS:  # spaces, or a language model's description
                self.hparams[name] = value
        # Without a Trainer, as in `load_from_checkpoint`, because this process runs no `fit`.
        trainer, self._trainer = self._trainer, None
        try:
            self.configure_model()
            self.on_load_checkpoint(checkpoint)
            return self.load_state_dict(checkpoint["state_dict"])
        finally:
            self._trainer = trainer

    # ---------------------------------------------------------------- loading

    # As in Lightning: a call on a module would leave that module unchanged.
    @_restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = True,
        **kwargs: Any,
    ) -> Any:
        """Builds the module of a checkpoint, see ``lightning.LightningModule.load_from_checkpoint``.

        Args:
            checkpoint_path: the file.
            map_location: as Lightning takes it.
            hparams_file: None; a checkpoint of this project holds its arguments.
            strict: as Lightning takes it.
            weights_only: load without running code; on by default.
            **kwargs: hyperparameters that differ from the checkpoint's.

        Raises:
            TypeError: called on a module instead of its class.
            UsageError: an unknown hyperparameter, a file that is no checkpoint of this class, one that names code
                which this project does not register and that is not given again, or weights of another network.
        """
        with loading(cls, checkpoint_path, hparams_file, kwargs) as saved:
            given = {**restored_arrays(saved, "hyper_parameters"), **kwargs}
            return super().load_from_checkpoint(checkpoint_path, map_location, None, strict, weights_only, **given)


def begin_training(module: "Algorithm") -> None:
    """Completes what Lightning loads of a checkpoint, right before the first batch."""
    if module.run.resumes:
        resume_training(module)
    module.run.has_begun = True
    # Not earlier, because the preparation of a run may draw from them.
    module.run.generators.start(module.device)
    if module.run.resumes:
        finish_batch(module.trainer)
