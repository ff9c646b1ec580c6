"""Every training episode in a file of Stable-Baselines3's format."""

import csv
import json
import time
from pathlib import Path
from typing import IO, Any

import lightning as L

from datamodules.base import ControlDataModule
from datamodules.resume import gather_ranks
from rl_modules.common.errors import UsageError


class EpisodeMonitor(L.Callback):
    """Writes ``monitor.csv`` into the run's folder: return, length and time of every training episode.

    The format is that of Stable-Baselines3's ``Monitor``, so that its ``load_results`` and plotting scripts read it: a
    line of JSON behind ``#``, then the columns ``r`` (undiscounted return of raw rewards), ``l`` (length in
    transitions) and ``t`` (seconds since ``t_start``). With several ranks each has a file ``<rank>.monitor.csv``. A run
    that resumes in its folder continues the file from the checkpoint's last episode; in another folder it begins one.

    Args:
        folder: of the file; None: the logger's, or the Trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._trainer: L.Trainer | None = None
        self._file: IO[str] | None = None
        self._rows: Any = None
        self._t_start_s = self._last_t_s = 0.0
        # Episodes of a checkpoint that are reported while it is loaded, before the file is open.
        self._early: list[tuple[float, int]] = []
        #: Of a checkpoint: where the file ended then, and when it began.
        self._saved: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return "EpisodeMonitor"

    def path(self, trainer: L.Trainer) -> Path:
        """The file of this rank."""
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        return folder / ("monitor.csv" if trainer.world_size == 1 else f"{trainer.global_rank}.monitor.csv")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, ControlDataModule):
            raise UsageError(f"EpisodeMonitor writes episodes of environments, which {type(data).__name__} has not; "
                             "leave it out")  # fmt: skip
        self._trainer, self._saved = trainer, None
        self._file, self._early = None, []
        data.collector.episodes.on_finished = self._write

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path, saved = self.path(trainer), self._saved
        path.parent.mkdir(parents=True, exist_ok=True)
        continues = saved is not None and path.is_file() and path.stat().st_size >= saved["size"]
        self._file = path.open("a" if continues else "w", encoding="utf-8", newline="\n")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if saved is not None and continues:
            # What came after the checkpoint comes again.
            self._file.truncate(saved["size"])
            self._t_start_s, self._last_t_s = saved["t_start"], saved["last_t"]
        else:
            self._t_start_s, self._last_t_s = time.time(), 0.0
            header = {"t_start": self._t_start_s, "env_id": trainer.datamodule.env_name}  # type: ignore[attr-defined]
            self._file.write(f"#{json.dumps(header)}\n")
            self._rows.writerow(["r", "l", "t"])
            self._file.flush()
        for episode_return, length in self._early:
            self._write(episode_return, length)

    def _write(self, episode_return: float, length: int) -> None:
        if self._file is None:
            self._early.append((episode_return, length))
            return
        # Episodes of one rollout are reported together; readers sort them by time.
        self._last_t_s = max(time.time() - self._t_start_s, self._last_t_s + 1e-6)
        self._rows.writerow([round(episode_return, 6), length, round(self._last_t_s, 6)])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._file is not None:
            self._file.flush()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._file is not None and stage == "fit":
            self._file.flush()  # a checkpoint may be written after the run
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer is None or self._file is None:
            return {}
        if not self._file.closed:
            self._file.flush()
        path = self.path(trainer)
        own = {"size": path.stat().st_size if path.is_file() else 0, "t_start": self._t_start_s,
               "last_t": self._last_t_s}  # fmt: skip
        return {"ranks": gather_ranks(own, trainer.global_rank, trainer.world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._trainer is None:
            return  # an evaluation or a prediction, which writes no episodes
        ranks = state_dict.get("ranks")
        if ranks and len(ranks) == self._trainer.world_size:
            self._saved = ranks[self._trainer.global_rank]
