"""Files of episodes: of training, in Stable-Baselines3's format, and of predictions, completions too."""

import csv
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rl_modules.common.errors import UsageError
from rl_modules.loggers import finite
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
            raise UsageError(
                f"info_keywords={list(self.info_keywords)} differ from those of {path}, {before}; resume "
                "with the same, or give another folder"
            )
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
        own = {
            "size": path.stat().st_size if path.is_file() else 0,
            "t_start": self._t_start_s,
            "last_t": self._last_t_s,
            "info_keywords": list(self.info_keywords),
        }
        return {"ranks": gather_ranks(own, trainer.global_rank, trainer.world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._trainer is None:
            return  # an evaluation or a prediction, which writes no episodes
        ranks = state_dict.get("ranks")
        if ranks and len(ranks) == self._trainer.world_size:
            self._saved = ranks[self._trainer.global_rank]


class EpisodeWriter(BasePredictionWriter):
    """Writes one row per predicted episode: number, return, length, seed (of episodes that are seeded one by one).

    Args:
        path: a file ending in ``.csv`` or ``.jsonl``; an existing one is replaced, a missing folder is made.

    Raises:
        UsageError: another ending.
    """

    #: Name of what one row describes, for the message.
    rows_are = "episodes"

    def __init__(self, path: str) -> None:
        super().__init__(write_interval="epoch")
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".jsonl"):
            raise UsageError(f"output={path!r} must end in .csv or .jsonl")

    @rank_zero_only
    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        rows = self.rows(predictions)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", encoding="utf-8", newline="") as file:
            if self.path.suffix == ".jsonl":
                file.writelines(json.dumps(finite(row)) + "\n" for row in rows)
            else:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        print(f"{len(rows)} {self.rows_are} written to {self.path}")

    def rows(self, predictions: Any) -> list[dict[str, Any]]:
        """Returns the rows to write, from the batches that ``predict_step`` returned."""
        columns = {key: torch.cat([batch[key] for batch in predictions]).tolist() for key in predictions[0]}
        return [
            {"episode": i, **dict(zip(columns, values, strict=True))}
            for i, values in enumerate(zip(*columns.values(), strict=True))
        ]


class CompletionWriter(EpisodeWriter):
    """Writes one row per held-out completion: prompt, completion, length, whether it is correct, every reward.

    For a reward model it writes one row per held-out pair: prompt, both answers and their rewards.
    """

    rows_are = "completions"

    def rows(self, predictions: Any) -> list[dict[str, Any]]:
        """Returns the rows to write, from the batches that ``predict_step`` returned."""
        rows = []
        for batch in predictions:
            judged = [name for name in ("chosen_reward", "rejected_reward", "reward") if name in batch]
            if judged:
                self.rows_are = "judgements" if judged == ["reward"] else "pairs"
                rewards = {name: batch[name].tolist() for name in judged}
                for i, texts in enumerate(batch["texts"]):
                    rows.append({**texts, **{name: values[i] for name, values in rewards.items()}})
                continue
            correct = None if batch["correct"] is None else batch["correct"].flatten().tolist()
            for i, (prompt, text) in enumerate(zip(batch["prompts"], batch["texts"], strict=True)):
                row = {
                    "prompt": prompt,
                    "completion": text,
                    "length": int(batch["length"][i]),
                    "finished": bool(batch["finished"][i]),
                }
                if correct is not None:
                    row["correct"] = correct[i]
                values = batch["rewards"][i].tolist()
                for name, value in zip(batch["reward_names"], values, strict=True):
                    row[f"rewards/{name}"] = None if value != value else value
                rows.append(row)
        return rows
