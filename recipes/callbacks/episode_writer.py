"""Predicted episodes and completions as a CSV or JSON-lines file."""

import csv
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rl_modules.common.errors import UsageError
from rl_modules.loggers import finite


class EpisodeWriter(BasePredictionWriter):
    """Writes one row per predicted episode: number, return, length, seed (of episodes that are seeded one by one).

    Args:
        path: a file ending in ``.csv`` or ``.jsonl``; an existing one is replaced.

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
                row = {"prompt": prompt, "completion": text, "length": int(batch["length"][i]),
                       "finished": bool(batch["finished"][i])}  # fmt: skip
                if correct is not None:
                    row["correct"] = correct[i]
                values = batch["rewards"][i].tolist()
                for name, value in zip(batch["reward_names"], values, strict=True):
                    row[f"rewards/{name}"] = None if value != value else value
                rows.append(row)
        return rows
