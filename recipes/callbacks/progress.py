"""Progress of a run: a bar, or lines in a log where there is no terminal."""

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from recipes.terminal import wait_for

#: Metrics of the progress bar; it shows the first two that a run has.
SHOWN = ("eval/pass@1", "train/reward", "eval/accuracy", "train/accuracy", "train/loss")


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
        wait_for("")
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
        self.watch_evaluations(trainer)

    def watch_evaluations(self, trainer: L.Trainer) -> None:
        """Shows how far an evaluation is that takes longer than a second."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        most = data.eval_max_steps

        def tell(steps: int) -> None:
            if self._progress is not None:
                text = f"evaluating: step {steps:,} of an episode, eval_max_steps={most:,}"
                self._progress.update(self._task, result=text)
                self._progress.refresh()

        data.watch.tell = tell

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


class StepProgressBar(TransitionProgressBar):
    """Shows the share of optimizer steps done, steps per second, the time left, success and loss."""

    unit = "steps"
    _started = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start(trainer)
        super().on_train_start(trainer, pl_module)

    def start(self, trainer: L.Trainer) -> None:
        """Begins to measure the speed."""
        self._started = time.monotonic(), trainer.global_step

    def watch_evaluations(self, trainer: L.Trainer) -> None:
        """Does nothing: a language model's evaluation ends with its longest completion."""

    def counts(self, trainer: L.Trainer) -> tuple[int, int | None]:
        """Returns the optimizer steps so far and their total; a total of None means that the run has no end."""
        total = trainer.estimated_stepping_batches
        return trainer.global_step, None if total == float("inf") else int(total)

    def notes(self, trainer: L.Trainer) -> tuple[str, str]:
        """Returns the steps per second and the last metrics, each as text."""
        started_s, started_at = self._started
        speed = (trainer.global_step - started_at) / max(time.monotonic() - started_s, 1e-9)
        module: Any = trainer.lightning_module
        latest = {**module.latest_metrics, **trainer.callback_metrics}
        known = [f"{name.partition('/')[2]} {float(latest[name]):.3g}" for name in SHOWN if name in latest]
        return f"{speed:.2f}/s", "  ".join(known[:2])


class ProgressLines:
    """Prints a line every half minute where there is no terminal; ``Checkpoints`` calls it between batches."""

    def __init__(self, bar: TransitionProgressBar, every_s: float = 30.0) -> None:
        self.bar = bar
        self.every_s = every_s
        self._began_s = self._due_s = 0.0
        self._done_before = 0

    def start(self, trainer: Any) -> None:
        """Begins to count the time of one run."""
        self.bar.start(trainer)
        self._began_s = time.monotonic()
        self._due_s = self._began_s + self.every_s
        self._done_before = self.bar.counts(trainer)[0]

    def tick(self, trainer: Any, now_s: float) -> None:
        """Prints a line if one is due."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + self.every_s
        done, total = self.bar.counts(trainer)
        speed, result = self.bar.notes(trainer)
        left = ""
        if total and done > self._done_before:
            seconds = (now_s - self._began_s) * (total - done) / (done - self._done_before)
            left = f", {_clock(seconds)} left"
        share = f" ({done / total:.0%})" if total else ""
        of = f" of {total:,}" if total else ""
        print(
            f"{_clock(now_s - self._began_s)}  {done:,}{of} {self.bar.unit}{share}, {speed}{left}"
            f"{f'  {result}' if result else ''}",
            file=sys.stderr,
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
