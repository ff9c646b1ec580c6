"""Checkpoints: written whole or not at all, at moments from which a run goes on exactly."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from recipes import curves
from recipes.finite import FiniteCheck
from recipes.optimizer_settings import apply_changes, settings_of
from recipes.signals import Stopped, StopRequests
from rl_modules.common.errors import UsageError

#: Several ranks ask each other about as often as this whether one was told to stop.
AGREEMENT_INTERVAL_S = 0.25
#: The first checkpoint comes after as many seconds, and each pause is twice the last, until there is one a minute.
FIRST_AFTER_S = 4.0


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, forces it to the disk, and renames: what stands under the target's name is whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.part")
        try:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException:
            # What is left of it must not fill the disk further.
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        _sync_folder(target.parent)


class Checkpoints(ModelCheckpoint):
    """``best.ckpt`` by evaluation and ``last.ckpt`` by the clock, in ``checkpoints`` beside the curves.

    ``last.ckpt`` is written between two batches, behind an optimizer step, and again at the end; Ctrl-C and SIGTERM
    have it written at the next such moment. The one before it stays as ``previous.ckpt``. Writing takes at most a
    twentieth of the run: a replay buffer of gigabytes is written less often. A disk that is full costs the checkpoint,
    not the run; a loss or gradient that is NaN ends the run before it gets into a checkpoint.

    Args:
        monitor: the metric whose best value ``best.ckpt`` has; None: the algorithm's own.
        mode: ``max`` or ``min``; read where ``monitor`` is given.
        interval_s: least seconds of training between two writes of ``last.ckpt``; at first the pauses are shorter, so
            that a short run that is killed has something to go on from.
        max_share: largest share of the time that writing ``last.ckpt`` may take, in (0, 1]; a write that took long is
            waited for longer.
        keep_previous: keep the checkpoint before the last as well, for when the last is damaged; takes as much disk.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: str = "max",
        interval_s: float = 60.0,
        max_share: float = 0.05,
        keep_previous: bool = True,
    ) -> None:
        super().__init__(
            monitor=monitor or "eval/mean_reward", mode=mode, filename="best", save_on_train_epoch_end=False,
            enable_version_counter=False
        )  # fmt: skip
        self._chosen = monitor is not None
        if interval_s < 0:
            raise UsageError(f"interval_s={interval_s} must not be negative")
        if not 0 < max_share <= 1:
            raise UsageError(f"max_share={max_share} must lie in (0, 1]")
        self.interval_s = interval_s
        self.max_share = max_share
        self.keep_previous = keep_previous
        self.last_path: Path | None = None
        self.requests = StopRequests()
        self._finite = FiniteCheck()
        self._trainer: L.Trainer | None = None
        self._settings: dict[str, Any] = {}
        self._saved_settings: dict[str, Any] | None = None
        self._between_batches = False
        self._due_s = self._pause_s = 0.0
        self._saved_at = (-1, -1, -1)
        self._batches, self._agree_every, self._agreed_s = 0, 1, 0.0

    @property
    def state_key(self) -> str:
        # Asked for at every hook of every batch, where Lightning's own would be put together anew each time.
        return "Checkpoints"

    # ---------------------------------------------------------------- a run

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        own = getattr(pl_module, "best_metric", None)
        if own is not None and not self._chosen and stage == "fit":
            self.monitor, self.mode = own
            self.kth_value = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)
        # Some strategies write in their own way, and refuse to be asked.
        with contextlib.suppress(NotImplementedError):
            if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
                trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The optimizers are new here; right after, a checkpoint's state is laid over them.
        self._settings = settings_of(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._saved_settings is not None:
            apply_changes(trainer, self._saved_settings, self._settings)
            self._saved_settings = None
        self._pause_s = min(FIRST_AFTER_S, self.interval_s)
        self._due_s = time.monotonic() + self._pause_s
        self._saved_at = _position(trainer)
        loader: Any = trainer.train_dataloader
        self._between_batches = hasattr(loader, "before_next")
        if self._between_batches:
            loader.before_next = lambda: self._safe_point(trainer)
        self.requests.install(*_requeue_signals(trainer))
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        if self.requests.are_noted and hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            # Before every batch Lightning asks all ranks whether the first got SIGTERM, which is noted here instead.
            epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Only look: a checkpoint written here would miss what the other hooks of this batch are about to do."""
        self._finite.after_batch(trainer, pl_module, outputs, batch, self._folder)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Loaders of other makes do not tell when they are asked for a batch.
        if not self._between_batches:
            self._safe_point(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.requests.restore()
        if _position(trainer) != self._saved_at and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_last(trainer, is_final=True)
        if _requeue_signals(trainer):
            # In a SLURM job Lightning would load the latest of these even to evaluate what has just been trained.
            if trainer.is_global_zero:
                for path in Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"):
                    path.unlink()
            trainer.strategy.barrier("hpc checkpoints removed")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.requests.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self.requests.restore()

    # ---------------------------------------------------------------- safe points

    def _safe_point(self, trainer: L.Trainer) -> None:
        """Save where that is due or asked for; called when everything of the last batch is over.

        Raises:
            Stopped: after saving, where that was asked for.
        """
        now = time.monotonic()
        stop, due = self.requests.signum, now >= self._due_s and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if trainer.world_size > 1:
            self._batches += 1
            if self._batches < self._agree_every:
                return
            stop, due = self._agree(trainer, stop, due, now)
        if not (stop or due) or (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if _position(trainer) != self._saved_at:
            self._save_last(trainer)
        if stop:
            self._stop(trainer, stop)

    def _agree(self, trainer: L.Trainer, stop: int, due: bool, now: float) -> tuple[int, bool]:
        """What all ranks do: they save together, or would wait for each other for ever."""
        rate = self._batches / max(now - self._agreed_s, 1e-6) if self._agreed_s else 0.0
        news = torch.tensor(
            [stop, due and trainer.is_global_zero, rate if trainer.is_global_zero else 0.0],
            device=trainer.strategy.root_device,
        )
        torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX)
        stop, due, rate = news.tolist()
        self._batches, self._agreed_s = 0, now
        self._agree_every = max(1, min(1000, int(rate * AGREEMENT_INTERVAL_S)))
        return int(stop), bool(due)

    def _stop(self, trainer: L.Trainer, signum: int) -> None:
        requeue = self.requests.handler_before(signum) if signum in _requeue_signals(trainer) else None
        if requeue is not None:
            requeue(signum, None)
        raise Stopped(signum, self.last_path)

    # ---------------------------------------------------------------- writing

    @property
    def _folder(self) -> Path:
        return Path(str(self.dirpath))

    def _save_last(self, trainer: L.Trainer, is_final: bool = False) -> None:
        folder = self._folder
        last, coming = folder / "last.ckpt", folder / "next.ckpt"
        self._finite.before_saving(trainer, folder)
        began_s = time.monotonic()
        try:
            trainer.save_checkpoint(coming)
            if trainer.is_global_zero:
                self._rotate(trainer, folder, coming, last)
            self._saved_at, self.last_path = _position(trainer), last
        except (OSError, RuntimeError) as error:
            # torch's writer reports the system's refusal in words of its own.
            if isinstance(error, RuntimeError) and "write" not in str(error):
                raise
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other ranks are waiting
            kept = f"the one before, {last}, is untouched" if last.exists() else "there is none before it"
            if is_final:
                raise UsageError(f"the last checkpoint can't be written to {folder}: {error}; {kept}") from error
            rank_zero_warn(f"The checkpoint can't be written: {error}; {kept}. Training goes on, and tries again.")
        now = time.monotonic()
        self._pause_s = min(2 * self._pause_s, self.interval_s)
        self._due_s = now + max(self._pause_s, (now - began_s) * (1 / self.max_share - 1))

    def _rotate(self, trainer: L.Trainer, folder: Path, coming: Path, last: Path) -> None:
        """``next`` becomes ``last``, and ``last`` ``previous``; there is a whole ``last`` at any time."""
        if coming.is_dir():
            raise UsageError(f"{coming} is a folder, as trainer.strategy={type(trainer.strategy).__name__} writes it, "
                             "where a run goes on from one file; take ddp or ModelParallelStrategy")  # fmt: skip
        if self.keep_previous and last.exists():
            previous, link = folder / "previous.ckpt", folder / "previous.ckpt.part"
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            try:
                os.link(last, link)
                os.replace(link, previous)
            except OSError:  # a filesystem without links
                os.replace(last, previous)
        os.replace(coming, last)
        _sync_folder(folder)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        assert self._trainer is not None
        return {
            **super().state_dict(),
            "settings": self._settings,
            "curves": curves.lengths(self._trainer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_settings = state_dict["settings"]
        best = os.path.join(str(self.dirpath), "best.ckpt")
        # A folder that is called by another path, or was moved with its run, is the same; a new one has a best to come.
        if state_dict["best_model_path"] and os.path.exists(best):
            score = state_dict["best_model_score"]
            super().load_state_dict({
                **state_dict, "dirpath": self.dirpath, "best_model_path": best, "kth_best_model_path": best,
                "best_k_models": {best: score},
            })  # fmt: skip


def _position(trainer: L.Trainer) -> tuple[int, int, int]:
    # Tabular agents take no optimizer steps, so that the epoch and its batch tell as well whether anything happened.
    return trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx


def _requeue_signals(trainer: L.Trainer) -> tuple[int, ...]:
    """The signal on which Lightning saves and hands a SLURM job back to the queue."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return (int(environment.requeue_signal),)
    return ()


def _sync_folder(folder: Path) -> None:
    """Force a renaming to the disk, where the system knows how."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
