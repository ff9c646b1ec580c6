"""A progress bar that counts environment transitions."""

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class TransitionProgressBar(ProgressBar):
    """Shows the share of transitions done, transitions per second, the time left and the last mean return.

    Shows nothing where the output is not a terminal.

    Args:
        refresh_s: seconds between two redraws.
    """

    #: What the counts count.
    unit = "transitions"

    def __init__(self, refresh_s: float = 0.25) -> None:
        super().__init__()
        self.refresh_s = refresh_s
        self._enabled = True
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._drawn_s = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero or not sys.stderr.isatty():
            return
        from rich.console import Console

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.completed:,.0f} of {task.total:,.0f}"),
            TextColumn("{task.fields[fps]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[result]}"),
            console=Console(stderr=True),
            auto_refresh=False,  # a drawing thread would take time from the run
        )
        done, total = self.counts(trainer)
        self._task = self._progress.add_task(type(pl_module).__name__, total=total, completed=done, fps="", result="")
        self._progress.start()

    def start(self, trainer: L.Trainer) -> None:
        """Called at the start of a run; the datamodule measures the speed of transitions itself."""

    def counts(self, trainer: L.Trainer) -> tuple[int, int | None]:
        """Returns the transitions so far and their total; a total of None means that the run has no end."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        return datamodule.num_timesteps, datamodule.total_timesteps

    def notes(self, trainer: L.Trainer) -> tuple[str, str]:
        """Returns the speed and the last result, each as text."""
        metrics = trainer.datamodule.metrics()  # type: ignore[attr-defined]
        reward = metrics.get("rollout/ep_rew_mean")
        return f"{metrics['time/fps']:,.0f}/s", "" if reward is None else f"mean return {reward:.1f}"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._progress is not None and time.monotonic() - self._drawn_s >= self.refresh_s:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._progress is not None:
            self._draw(trainer)
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _draw(self, trainer: L.Trainer) -> None:
        assert self._progress is not None
        speed, result = self.notes(trainer)
        self._progress.update(self._task, completed=self.counts(trainer)[0], fps=speed, result=result)
        self._progress.refresh()
        self._drawn_s = time.monotonic()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
