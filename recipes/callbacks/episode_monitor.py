"""Every training episode in a file of Stable-Baselines3's format."""

import csv
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import lightning as L

from rl_modules.common.errors import UsageError
from rl_modules.ranks import gather_ranks

#: Of every episode, as in Stable-Baselines3.
COLUMNS = ("r", "l", "t")


class EpisodeMonitor(L.Callback):
    """Writes ``monitor.csv`` into the run's folder: return, length and time of every training episode.

    The format is that of Stable-Baselines3's ``Monitor``, so that its ``load_results`` and plotting scripts read it: a
    line of JSON after ``#``, then the columns ``r`` (undiscounted return of raw rewards), ``l`` (length in
    transitions), ``t`` (seconds since ``t_start``) and ``info_keywords``. With several ranks each has a file
    ``<rank>.monitor.csv``. A run that resumes in its folder continues the file from the checkpoint's last episode; in
    another folder it begins one.

    Args:
        folder: of the file; None: the logger's, or the Trainer's ``default_root_dir``.
        info_keywords: entries of the info at an episode's end to write beside them, numbers or texts.

    Raises:
        UsageError: in training, an info lacks one of ``info_keywords``; a resumed run has others.
    """

    def __init__(self, folder: str | Path | None = None, info_keywords: Sequence[str] = ()) -> None:
        super().__init__()
        self.folder = folder
        self.info_keywords = tuple(info_keywords)
        self._trainer: L.Trainer | None = None
        self._file: IO[str] | None = None
        self._rows: Any = None
        self._t_start_s = self._last_t_s = 0.0
        # Episodes of a checkpoint that are reported while it is loaded, before the file is open.
        self._early: list[tuple[Any, ...]] = []
        #: Of a checkpoint: the length of the file, and its start time.
        self._saved: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return "EpisodeMonitor"

    def path(self, trainer: L.Trainer) -> Path:
        """Returns the file of this rank."""
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        return folder / ("monitor.csv" if trainer.world_size == 1 else f"{trainer.global_rank}.monitor.csv")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._trainer, self._saved = trainer, None
        self._file, self._early = None, []
        data.collector.episodes.on_finished = self._write
        data.collector.episodes.info_keywords = self.info_keywords

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path, saved = self.path(trainer), self._saved
        path.parent.mkdir(parents=True, exist_ok=True)
        continues = saved is not None and path.is_file() and path.stat().st_size >= saved["size"]
        if saved is not None and continues and (before := saved.get("info_keywords", [])) != list(self.info_keywords):
            raise UsageError(f"info_keywords={list(self.info_keywords)} differ from those of {path}, {before}; resume "
                             "with the same, or give another folder")  # fmt: skip
        self._file = path.open("a" if continues else "w", encoding="utf-8", newline="\n")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if saved is not None and continues:
            # The resumed run writes the episodes after the checkpoint again.
            self._file.truncate(saved["size"])
            self._t_start_s, self._last_t_s = saved["t_start"], saved["last_t"]
        else:
            self._t_start_s, self._last_t_s = time.time(), 0.0
            header = {"t_start": self._t_start_s, "env_id": trainer.datamodule.env_name}  # type: ignore[attr-defined]
            self._file.write(f"#{json.dumps(header)}\n")
            self._rows.writerow([*COLUMNS, *self.info_keywords])
            self._file.flush()
        for episode in self._early:
            self._write(*episode)

    def _write(self, episode_return: float, length: int, *noted: Any) -> None:
        if self._file is None:
            self._early.append((episode_return, length, *noted))
            return
        # Episodes of one rollout are reported together; readers sort them by time.
        self._last_t_s = max(time.time() - self._t_start_s, self._last_t_s + 1e-6)
        self._rows.writerow([round(episode_return, 6), length, round(self._last_t_s, 6), *noted])

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
               "last_t": self._last_t_s, "info_keywords": list(self.info_keywords)}  # fmt: skip
        return {"ranks": gather_ranks(own, trainer.global_rank, trainer.world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._trainer is None:
            return  # an evaluation or a prediction, which writes no episodes
        ranks = state_dict.get("ranks")
        if ranks and len(ranks) == self._trainer.world_size:
            self._saved = ranks[self._trainer.global_rank]
