"""Writes checkpoints between two batches, from where a run resumes exactly."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.mixins import HyperparametersMixin
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from recipes.callbacks import curves
from recipes.callbacks.checkpoint_files import AtomicCheckpointIO, keep, rotate
from recipes.callbacks.curves import log_folder
from recipes.callbacks.optimizer_settings import apply_changes, optimizer_settings
from recipes.callbacks.progress import ProgressLines
from recipes.callbacks.stops import FiniteCheck
from recipes.signals import (
    RankAgreement,
    Stopped,
    StopRequests,
    end_at_sigterm,
    remove_requeue_checkpoints,
    requeue_signals,
)
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.core.settings import Converted, Declared, setting
from rl_modules.loggers import adapters

#: What is known of the best checkpoint while there is none.
NO_BEST: dict[str, Any] = {"best_model_path": "", "best_model_score": None, "best_at": None}
#: Seconds to the first checkpoint. Each pause is twice the one before, up to ``interval_s``.
FIRST_AFTER_S = 4.0


class Checkpoints(Declared, HyperparametersMixin, Checkpoint):
    """Writes ``best.ckpt`` after the best evaluation, the later of equal ones, and ``last.ckpt`` at intervals, into
    ``checkpoints`` in the run's folder.

    ``last.ckpt`` is written between two batches, after an optimizer step, and again at the end. Ctrl-C, SIGTERM and
    SIGHUP write it at the next such moment and stop the run. The checkpoint before it stays as ``previous.ckpt``.
    Writing takes at most a twentieth of the run's time, so that a replay buffer of gigabytes is written less often. If
    the disk is full, the run continues without a new checkpoint. A NaN loss or gradient stops the run before a
    checkpoint stores it (:class:`recipes.callbacks.FiniteCheck`).
    """

    monitor: Converted[str | None, str] = setting(
        default=None,
        says="metric that selects ``best.ckpt``; None: the algorithm's own, for pass@1 the reward while it is 0",
        kw_only=False,
    )
    mode: str = setting(default="max", says="used with ``monitor`` only", one_of=("max", "min"), kw_only=False)
    interval_s: float = setting(
        default=60.0,
        says="least seconds of training between two writes of ``last.ckpt``. The first pauses are shorter, so that a "
        "short run can be resumed too",
        least=0,
        kw_only=False,
    )
    max_share: float = setting(
        default=0.05,
        says="largest share of the time that writing ``last.ckpt`` may take; the pause after a long write is longer",
        above=0,
        most=1,
        kw_only=False,
    )
    keep_previous: bool = setting(
        default=True,
        says="keep the checkpoint before the last, in case the last is damaged; needs as much disk again",
        kw_only=False,
    )
    keep_all: bool = setting(
        default=False,
        says="keep every ``last.ckpt`` also as ``step-<optimizer step>.ckpt``, from which ``rl replay`` and ``rl "
        "verify`` recompute parts of a run; needs a checkpoint's disk space for each",
        kw_only=False,
    )

    #: The number of best checkpoints that are kept, which the loggers of Weights & Biases and MLflow read.
    save_top_k: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._chosen = self.monitor is not None
        self.monitor = self.monitor or "eval/mean_reward"
        #: The algorithm's own metric, and the one that selects the best while that is 0.
        self._own: str | None = None
        self.while_zero: str | None = None
        #: Whether checkpoints are written; ``trainer.enable_checkpointing=false`` of the command line turns it off.
        self.writes = True
        #: Called between any two batches, with the Trainer.
        self.observers: list[Callable[[L.Trainer], None]] = []
        self.dirpath: str | None = None
        self.last_path: Path | None = None
        self.best_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        #: Where on the curves' axis the best and the last evaluation were; None: there was none.
        self.best_at: int | None = None
        self.evaluated_at: int | None = None
        #: Event files of a run that resumes, which end where the checkpoint was written once it has been accepted.
        self.to_cut: list[Path] = []
        self.requests = StopRequests()
        #: Prints lines where there is no terminal; the command line sets it.
        self.progress: ProgressLines | None = None
        self._finite: FiniteCheck | None = FiniteCheck()
        self._ranks = RankAgreement()
        self._trainer: L.Trainer | None = None
        self._settings: dict[str, Any] = {}
        self._saved_settings: dict[str, Any] | None = None
        self._between_batches = False
        self._due_s = self._pause_s = 0.0
        self._saved_at = (-1, -1, -1)

    @classmethod
    def of(cls, trainer: L.Trainer) -> "Checkpoints | None":
        """Returns a Trainer's callback of this class; the user may have added a ModelCheckpoint as well."""
        return next((callback for callback in trainer.checkpoint_callbacks if isinstance(callback, cls)), None)

    @property
    def state_key(self) -> str:
        return "Checkpoints"  # also of a subclass

    # ---------------------------------------------------------------- a run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if stage == "fit":
            resumed = getattr(trainer, "resumed", None)  # Lightning's own Trainer resumes in no folder
            self.last_path = None if resumed is None else resumed.checkpoint
            self.dirpath = self.evaluated_at = None
            vars(self).update(NO_BEST)  # a resumed run loads its best later
            own = getattr(pl_module, "best_metric", None)
            if own is not None and not self._chosen:
                self.monitor, self.mode = own
                self._own, self.while_zero = own[0], getattr(pl_module, "best_while_zero", {}).get(own[0])
        if self.dirpath is None:
            self.dirpath = trainer.strategy.broadcast(str(log_folder(trainer) / "checkpoints"))
        end_at_sigterm(trainer)
        self._trainer = trainer
        # A FiniteCheck among the user's callbacks replaces this one.
        self._finite = None if any(isinstance(other, FiniteCheck) for other in callbacks) else FiniteCheck()
        AtomicCheckpointIO.install(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The optimizers are new here; Lightning loads a checkpoint's state into them after this hook.
        self._settings = optimizer_settings(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved_settings:  # empty: another callback wrote the checkpoint before there were optimizers
            apply_changes(trainer, self._saved_settings, self._settings)
        self._saved_settings = None
        if self.progress is not None:
            self.progress.start(trainer)
        self._pause_s = min(FIRST_AFTER_S, self.interval_s)
        self._due_s = time.monotonic() + self._pause_s
        self._saved_at = _position(trainer)
        self._watch_loader(trainer)
        if self.writes:
            self.requests.install(*requeue_signals(trainer))
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        if self.requests.is_installed and hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            # Lightning broadcasts before every batch whether rank 0 received SIGTERM; `requests` handles it instead.
            epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # With reload_dataloaders_every_n_epochs this epoch has another loader.
        self._watch_loader(trainer)

    def _watch_loader(self, trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        self._between_batches = hasattr(loader, "before_next")
        if self._between_batches:
            loader.before_next = lambda: self._safe_point(trainer)
            loader.while_waiting = lambda: self._wait(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks the batch. Writes no checkpoint, because other hooks of this batch have yet to run."""
        if self._finite is not None:
            self._finite.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._finite is not None:
            self._finite.on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Only the project's LazyLoader calls back before each batch; with other loaders a run saves after each epoch.
        if not self._between_batches:
            self._safe_point(trainer, ends_epoch=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.requests.restore()
        is_due = self.writes and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_due and _position(trainer) != self._saved_at:
            self._save_last(trainer, is_final=True)
        remove_requeue_checkpoints(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.requests.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.requests.restore()

    # ---------------------------------------------------------------- the best

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.evaluated_at = getattr(pl_module, "place", trainer.global_step)
        is_trial = trainer.fast_dev_run  # type: ignore[attr-defined]
        if not self.writes or is_trial or trainer.global_step == 0:  # the untrained policy is no result
            return
        self._choose_metric(trainer.callback_metrics)
        score = trainer.callback_metrics.get(self.monitor)
        if score is None and self._chosen:
            raise UsageError(
                f"checkpoint.monitor={self.monitor!r} is no metric of {type(pl_module).__name__}; it has "
                f"{', '.join(sorted(known := trainer.callback_metrics))}{did_you_mean(self.monitor, known)}"
            )
        if score is not None and self._is_best(trainer, score):
            before = {name: getattr(self, name) for name in NO_BEST}
            self.best_model_path, self.best_model_score = str(self._folder / "best.ckpt"), score.clone()
            self.best_at = self.evaluated_at
            if failure := self._write(trainer, "best.ckpt"):
                vars(self).update(before)
                rank_zero_warn(f"The best checkpoint can't be written: {failure}. Training continues.")
            elif trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.after_save_checkpoint(self)  # type: ignore[arg-type]

    def _choose_metric(self, metrics: dict[str, torch.Tensor]) -> None:
        """Goes by another metric while the algorithm's own has been 0 in every evaluation, and by that one then."""
        if self.while_zero not in metrics or self._own not in metrics:
            return
        is_zero = float(metrics[self._own]) == 0 and (self.monitor != self._own or self.best_model_score is None)
        if self.monitor != (wanted := self.while_zero if is_zero else self._own):
            self.monitor = wanted
            vars(self).update(NO_BEST)

    def _is_best(self, trainer: L.Trainer, score: torch.Tensor) -> bool:
        """Returns whether an evaluation is the best so far, or as good, for all ranks; NaN is worse than any number."""
        best = self.best_model_score
        if best is None or best.isnan():
            return True
        return trainer.strategy.reduce_boolean_decision(bool(score <= best if self.mode == "min" else score >= best))

    # ---------------------------------------------------------------- safe points

    def _safe_point(self, trainer: L.Trainer, ends_epoch: bool = False) -> None:
        """Saves if a checkpoint is due or a signal came; called after the last batch and before the next."""
        for observe in self.observers:
            observe(trainer)
        now_s = time.monotonic()
        if self.progress is not None:
            self.progress.tick(trainer, now_s)
        # The ranks' agreement is valid only now, so they exchange only where saving is possible.
        if not ends_epoch and not _is_between_steps(trainer):
            return
        is_due = self.writes and now_s >= self._due_s and not trainer.fast_dev_run  # type: ignore[attr-defined]
        stop, is_due = self._ranks.decide(trainer, self.requests.signum, is_due)
        if (stop or is_due) and _position(trainer) != self._saved_at:
            self._save_last(trainer)
        if stop:
            self._stop(trainer, stop)

    def _wait(self, trainer: L.Trainer) -> None:
        """Saves and stops if a signal came, within the warm-up of replay or a round of whole episodes."""
        if self.progress is not None:
            self.progress.tick(trainer, time.monotonic())
        if not _is_between_steps(trainer):
            return
        stop, _ = self._ranks.decide(trainer, self.requests.signum, False)
        if stop:
            self._save_last(trainer)
            self._stop(trainer, stop)

    def _stop(self, trainer: L.Trainer, signum: int) -> None:
        requeue = self.requests.previous_handler(signum) if signum in requeue_signals(trainer) else None
        if requeue is not None:
            requeue(signum, None)
        raise Stopped(signum, self.last_path, _number_if_older(trainer))

    # ---------------------------------------------------------------- writing

    @property
    def _folder(self) -> Path:
        return Path(str(self.dirpath))

    def _save_last(self, trainer: L.Trainer, is_final: bool = False) -> None:
        last = self._folder / "last.ckpt"
        began_s = time.monotonic()
        if failure := self._write(trainer, "next.ckpt"):
            kept = f"the one before, {last}, is untouched" if last.exists() else "there is none before it"
            if is_final:
                raise UsageError(f"the last checkpoint can't be written to {last.parent}: {failure}; {kept}")
            rank_zero_warn(f"The checkpoint can't be written: {failure}; {kept}. Training continues and tries again.")
        else:
            self._saved_at, self.last_path = _position(trainer), last
        now = time.monotonic()
        self._pause_s = min(2 * self._pause_s, self.interval_s)
        self._due_s = now + max(self._pause_s, (now - began_s) * (1 / self.max_share - 1))

    def _write(self, trainer: L.Trainer, name: str) -> str:
        """Writes a checkpoint; ``next.ckpt`` becomes ``last.ckpt``. Returns what a disk says that can't take it, or "".

        Only the first rank writes. All know the result, because otherwise some would save again without the others.
        """
        failure = ""
        try:
            trainer.save_checkpoint(path := self._folder / name, weights_only=False)
            if path.is_dir():
                raise UsageError(
                    f"{path} is a folder, as trainer.strategy={type(trainer.strategy).__name__} writes it, "
                    "but a run resumes from one file; use ddp or ModelParallelStrategy"
                )
        except OSError as error:
            failure = str(error)
            trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait there
        if not failure and trainer.is_global_zero and name == "next.ckpt":
            try:
                self._rotate(trainer, self._folder)
            except OSError as error:
                failure = str(error)
        return trainer.strategy.broadcast(failure)

    def _rotate(self, trainer: L.Trainer, folder: Path) -> None:
        """Replaces the last checkpoint by the new one."""
        # A run that resumed from another file found the last one damaged.
        rotate(folder, self.keep_previous and (self.last_path is None or self.last_path.name == "last.ckpt"))
        if self.keep_all:
            keep(folder, trainer.global_step)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        assert self._trainer is not None
        return {
            **{name: getattr(self, name) for name in (*NO_BEST, "monitor", "mode", "evaluated_at")},
            "settings": self._settings,
            "curves": curves.lengths(self._trainer),
            "loggers": [adapter.position() for adapter in adapters(self._trainer)],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning loads module and datamodule before: what they refuse costs the run none of its curves.
        curves.cut(self.to_cut, state_dict["curves"])
        self.to_cut = []
        self._saved_settings = state_dict["settings"]
        self.evaluated_at = state_dict.get("evaluated_at")
        if self.while_zero is not None and state_dict["monitor"] == self.while_zero:
            self.monitor = self.while_zero
        # The best checkpoint by another metric is not comparable. A new folder has none yet, and a run's folder may
        # have been moved or be named by another path.
        is_same = (state_dict["monitor"], state_dict.get("mode", self.mode)) == (self.monitor, self.mode)
        if is_same and state_dict["best_model_path"] and (best := self._folder / "best.ckpt").exists():
            self.best_model_path, self.best_model_score = str(best), state_dict["best_model_score"]
            self.best_at = state_dict.get("best_at")


def _number_if_older(trainer: L.Trainer) -> int | None:
    """Returns the number of a run's folder where a newer run has a higher one; None for several loggers."""
    if len(trainer.loggers) != 1 or not isinstance(trainer.loggers[0], TensorBoardLogger | CSVLogger):
        return None
    folder = log_folder(trainer)
    names = [
        path.name.removeprefix("version_").partition("_")[0] for path in (folder, *folder.parent.glob("version_*"))
    ]
    own, *others = (int(name) if name.isdigit() else -1 for name in names)
    return own if -1 < own < max(others) else None


def _is_between_steps(trainer: L.Trainer) -> bool:
    """Returns whether no gradients are accumulated that an optimizer step is to follow."""
    return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0


def _position(trainer: L.Trainer) -> tuple[int, int, int]:
    # Tabular agents take no optimizer steps, so epoch and batch change while `global_step` does not.
    return trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx
