"""What stands around every run: progress, the record of its settings, the files it writes."""

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rl_modules.common.errors import UsageError


class TransitionProgressBar(ProgressBar):
    """A bar that counts transitions: share done, transitions per second, time left, last mean return.

    Silent where the output is no terminal.

    Args:
        refresh_s: seconds between two redraws.
    """

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
            auto_refresh=False,  # a thread that draws would take time from the run
        )
        done, total = self.counts(trainer)
        self._task = self._progress.add_task(type(pl_module).__name__, total=total, completed=done, fps="", result="")
        self._progress.start()

    def counts(self, trainer: L.Trainer) -> tuple[int, int | None]:
        """How much is done, and of how much; None: there is no end."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        return datamodule.num_timesteps, datamodule.total_timesteps

    def notes(self, trainer: L.Trainer) -> tuple[str, str]:
        """The speed, and the last result."""
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


class ConfigRecord(SaveConfigCallback):
    """Writes the resolved config into TensorBoard as text; where a run goes on, it is there already."""

    #: True where the run goes on in a folder that has the config.
    resumes = False

    def __init__(self, parser: Any, config: Any, **arguments: Any) -> None:
        # Who uses the recorded file begins a run like this one, wherever this one began.
        recorded = config.clone()
        for name, value in (("ckpt_path", None), ("resume", False)):
            if name in recorded:
                recorded[name] = value
        super().__init__(parser, recorded, **arguments)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or self.resumes:
            return
        text = self.parser.dump(self.config)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))


class EpisodeWriter(BasePredictionWriter):
    """Writes predicted episodes, one row each: number, return, length, seed.

    Args:
        path: a file ending in ``.csv`` or ``.jsonl``; an existing one is replaced.

    Raises:
        UsageError: another ending, or a folder that does not exist.
    """

    #: What a row is, for the message.
    rows_are = "episodes"

    def __init__(self, path: str) -> None:
        super().__init__(write_interval="epoch")
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".jsonl"):
            raise UsageError(f"output={path!r} must end in .csv or .jsonl")
        if not self.path.parent.is_dir():
            raise UsageError(f"output={path!r}: the folder {self.path.parent} does not exist")

    @rank_zero_only
    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        rows = self.rows(predictions)
        with self.path.open("w", encoding="utf-8", newline="") as file:
            if self.path.suffix == ".jsonl":
                file.writelines(json.dumps(row) + "\n" for row in rows)
            else:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        print(f"{len(rows)} {self.rows_are} written to {self.path}")

    def rows(self, predictions: Any) -> list[dict[str, Any]]:
        """What is written, from the batches that ``predict_step`` returned."""
        columns = {key: torch.cat([batch[key] for batch in predictions]).tolist() for key in predictions[0]}
        return [
            {"episode": i, **dict(zip(columns, values, strict=True))}
            for i, values in enumerate(zip(*columns.values(), strict=True))
        ]
