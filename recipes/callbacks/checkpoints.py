"""Writes checkpoints between two batches, from where a run resumes exactly."""

import copy
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
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
from rl_modules.loggers import adapters

#: What a ModelCheckpoint knows of the best checkpoint.
_BEST = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "kth_best_model_path",
    "kth_value",
    "current_score",
    "best_at",
    "monitor",
)
#: Packages whose callbacks log no metrics of a user's.
_PACKAGES = ("lightning", "recipes", "rl_modules")
#: Seconds to the first checkpoint. Each pause is twice the one before, up to ``interval_s``.
FIRST_AFTER_S = 4.0


class Checkpoints(ModelCheckpoint):
    """Writes ``best.ckpt`` after the best evaluation, the later of equal ones, and ``last.ckpt`` at intervals, into
    ``checkpoints`` in the run's folder.

    ``last.ckpt`` is written between two batches, after an optimizer step, and again at the end. Ctrl-C, SIGTERM and
    SIGHUP write it at the next such moment and stop the run. The checkpoint before it stays as ``previous.ckpt``.
    Writing takes at most a twentieth of the run's time, so that a replay buffer of gigabytes is written less often. If
    the disk is full, the run continues without a new checkpoint. A NaN loss or gradient stops the run before a
    checkpoint stores it (:class:`recipes.callbacks.FiniteCheck`).

    Args:
        monitor: metric that selects ``best.ckpt``; None: the algorithm's own, for pass@1 the reward while it is 0.
        mode: ``max`` or ``min``; used with ``monitor`` only.
        interval_s: least seconds of training between two writes of ``last.ckpt``. The first pauses are shorter, so that
            a short run can be resumed too.
        max_share: largest share of the time that writing ``last.ckpt`` may take, in (0, 1]; the pause after a long
            write is longer.
        keep_previous: keep the checkpoint before the last, in case the last is damaged; needs as much disk again.
        keep_all: keep every ``last.ckpt`` also as ``step-<optimizer step>.ckpt``, from which ``rl replay`` and ``rl
            verify`` recompute parts of a run; needs a checkpoint's disk space for each.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: str = "max",
        interval_s: float = 60.0,
        max_share: float = 0.05,
        keep_previous: bool = True,
        keep_all: bool = False,
    ) -> None:
        if mode not in ("max", "min"):
            raise UsageError(f"mode={mode!r} must be max or min")
        super().__init__(
            monitor=monitor or "eval/mean_reward",
            mode=mode,
            filename="best",
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self._chosen = monitor is not None
        #: The algorithm's own metric, and the one that selects the best while that is 0.
        self._own: str | None = None
        self.while_zero: str | None = None
        if interval_s < 0:
            raise UsageError(f"interval_s={interval_s} must not be negative")
        if not 0 < max_share <= 1:
            raise UsageError(f"max_share={max_share} must lie in (0, 1]")
        self.interval_s = interval_s
        self.max_share = max_share
        self.keep_previous = keep_previous
        self.keep_all = keep_all
        #: Whether checkpoints are written; ``trainer.enable_checkpointing=false`` of the command line turns it off.
        self.writes = True
        #: Called between any two batches, with the Trainer.
        self.observers: list[Callable[[L.Trainer], None]] = []
        self.last_path: Path | None = None
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
        # Lightning reads this at every hook of every batch; its own would format a string each time.
        return "Checkpoints"

    # ---------------------------------------------------------------- a run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and self._trainer is not None:
            self._forget_run()
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if stage == "fit":
            resumed = getattr(trainer, "resumed", None)  # Lightning's own Trainer resumes in no folder
            self.last_path = None if resumed is None else resumed.checkpoint
            for callback in callbacks:
                require_metric(callback, callbacks, pl_module)
        super().setup(trainer, pl_module, stage)
        end_at_sigterm(trainer)
        self._trainer = trainer
        own = getattr(pl_module, "best_metric", None)
        if own is not None and not self._chosen and stage == "fit":
            self.monitor, self.mode = own
            self._own, self.while_zero = own[0], getattr(pl_module, "best_while_zero", {}).get(own[0])
            self.kth_value = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)
        # A FiniteCheck among the user's callbacks replaces this one.
        self._finite = None if any(isinstance(other, FiniteCheck) for other in callbacks) else FiniteCheck()
        AtomicCheckpointIO.install(trainer)

    def _forget_run(self) -> None:
        """Resets folder and best checkpoint of an earlier run; a resumed run loads its best later."""
        self.dirpath = self.evaluated_at = None
        self._forget_best()

    def _forget_best(self) -> None:
        """Resets the best checkpoint."""
        self.best_model_score = self.current_score = self.best_at = None
        self.best_model_path = self.kth_best_model_path = ""
        self.best_k_models = {}
        self.kth_value = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The optimizers are new here; Lightning loads a checkpoint's state into them after this hook.
        self._settings = optimizer_settings(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
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

    def check_monitor_top_k(self, trainer: L.Trainer, current: torch.Tensor | None = None) -> bool:
        """Returns whether an evaluation is the best so far, or as good."""
        is_equal = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        is_best = super().check_monitor_top_k(trainer, current) or is_equal
        self.best_at = self.evaluated_at if is_best else self.best_at
        return is_best

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.evaluated_at = getattr(pl_module, "place", trainer.global_step)
        if not self.writes:
            return
        before = {name: copy.copy(getattr(self, name)) for name in _BEST}
        if not trainer.sanity_checking:
            self._choose_metric(trainer.callback_metrics)
        error = self._disk_error(trainer, lambda: super(Checkpoints, self).on_validation_end(trainer, pl_module))
        if (failure := trainer.strategy.broadcast(None if error is None else str(error))) is not None:
            vars(self).update(before)
            rank_zero_warn(f"The best checkpoint can't be written: {failure}. Training continues.")

    def _choose_metric(self, metrics: dict[str, torch.Tensor]) -> None:
        """Goes by another metric while the algorithm's own has been 0 in every evaluation, and by that one then."""
        if self.while_zero not in metrics or self._own not in metrics:
            return
        is_zero = float(metrics[self._own]) == 0 and (self.monitor != self._own or self.best_model_score is None)
        if self.monitor != (wanted := self.while_zero if is_zero else self._own):
            self.monitor = wanted
            self._forget_best()

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
        super().teardown(trainer, pl_module, stage)
        self.requests.restore()

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
        error = self._write(trainer)
        # Only the first rank writes. All must know the result, because otherwise some would save again without the
        # others.
        failure = trainer.strategy.broadcast(None if error is None else str(error))
        if failure is None:
            self._saved_at, self.last_path = _position(trainer), last
        else:
            kept = f"the one before, {last}, is untouched" if last.exists() else "there is none before it"
            if is_final:
                raise UsageError(f"the last checkpoint can't be written to {last.parent}: {failure}; {kept}") from error
            rank_zero_warn(f"The checkpoint can't be written: {failure}; {kept}. Training continues and tries again.")
        now = time.monotonic()
        self._pause_s = min(2 * self._pause_s, self.interval_s)
        self._due_s = now + max(self._pause_s, (now - began_s) * (1 / self.max_share - 1))

    def _write(self, trainer: L.Trainer) -> Exception | None:
        """Writes a checkpoint and rotates the files; returns the error of a disk that can't take it."""
        folder, coming = self._folder, self._folder / "next.ckpt"
        if error := self._disk_error(trainer, lambda: trainer.save_checkpoint(coming, weights_only=False)):
            return error
        if coming.is_dir():
            raise UsageError(
                f"{coming} is a folder, as trainer.strategy={type(trainer.strategy).__name__} writes it, "
                "but a run resumes from one file; use ddp or ModelParallelStrategy"
            )
        if trainer.is_global_zero:
            try:
                self._rotate(trainer, folder)
            except OSError as error:
                return error
        return None

    def _disk_error(self, trainer: L.Trainer, write: Callable[[], Any]) -> Exception | None:
        """Calls ``write``; returns the error of a disk that can't take a checkpoint."""
        try:
            write()
        except (OSError, RuntimeError) as error:
            # torch raises RuntimeError for the system's error where another plugin than this project's writes.
            if isinstance(error, RuntimeError) and not re.search("inline_container|PytorchStreamWriter", str(error)):
                raise
            trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait there
            return error
        return None

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
            **super().state_dict(),
            "mode": self.mode,
            "best_at": self.best_at,
            "evaluated_at": self.evaluated_at,
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
        best = os.path.join(str(self.dirpath), "best.ckpt")
        if self.while_zero is not None and state_dict["monitor"] == self.while_zero:
            self.monitor = self.while_zero
        # The best checkpoint by another metric is not comparable.
        if (state_dict["monitor"], state_dict.get("mode", self.mode)) != (self.monitor, self.mode):
            return
        # A run's folder may have been moved or be named by another path. A new folder has no best checkpoint yet.
        if state_dict["best_model_path"] and os.path.exists(best):
            score, self.best_at = state_dict["best_model_score"], state_dict.get("best_at")
            super().load_state_dict(
                {
                    **state_dict,
                    "dirpath": self.dirpath,
                    "best_model_path": best,
                    "kth_best_model_path": best,
                    "best_k_models": {best: score},
                }
            )


def _number_if_older(trainer: L.Trainer) -> int | None:
    """Returns the number of a run's folder where a newer run has a higher one; None for several loggers."""
    if len(trainer.loggers) != 1 or not isinstance(trainer.loggers[0], TensorBoardLogger | CSVLogger):
        return None
    folder = log_folder(trainer)
    numbers = {
        path.name: int(number)
        for path in folder.parent.glob("version_*")
        if (number := path.name.removeprefix("version_")).isdigit()
    }
    own = numbers.get(folder.name)
    return own if own is not None and own < max(numbers.values()) else None


def _is_between_steps(trainer: L.Trainer) -> bool:
    """Returns whether no gradients are accumulated that an optimizer step is to follow."""
    return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0


def _position(trainer: L.Trainer) -> tuple[int, int, int]:
    # Tabular agents take no optimizer steps, so epoch and batch change while `global_step` does not.
    return trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx


def require_metric(callback: Any, callbacks: list[L.Callback], module: Any) -> None:
    """Refuses a metric that the algorithm never logs; a user's module and a user's callbacks may log any."""
    known, monitor = getattr(module, "evaluation_metrics", None), getattr(callback, "monitor", None)
    selects = isinstance(callback, Checkpoints)
    if known is None or monitor is None or monitor in known or (selects and not callback._chosen):
        return
    is_users = type(module).__module__.partition(".")[0] != "rl_modules" or any(
        isinstance(x, LambdaCallback) or type(x).__module__.partition(".")[0] not in _PACKAGES for x in callbacks
    )
    # Lightning's ModelCheckpoint knows the last two, its LearningRateMonitor logs the ones before.
    is_of_training = monitor.startswith(("train/", "rollout/", "time/", "lr-")) or monitor in ("epoch", "step")
    if not is_users and (selects or not is_of_training):
        name = "checkpoint" if selects else type(callback).__name__
        raise UsageError(
            f"{name}.monitor={monitor!r} is no metric of {type(module).__name__}; it has "
            f"{', '.join(known)}{did_you_mean(monitor, known)}"
        )
