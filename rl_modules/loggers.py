"""Settings, tables, histograms and resumed curves in each of Lightning's loggers: one adapter per logger.

Scalars need no adapter, for every logger has ``log_metrics``. A logger without an adapter gets scalars only.
"""

import csv
import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

from rl_modules.common.errors import visible

Columns = Mapping[str, Sequence[Any]]
#: Bars of a histogram in a CSV file.
BARS = 32
#: Arguments that a run fills in by itself.
FILLED_IN = ("observation_space", "action_space", "description")


class LoggerAdapter:
    """Writes what a logger shows besides scalars. The base class writes settings alone."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Writes a run's settings before its first step."""
        self.logger.log_hyperparams(settings)

    def write_result(self, settings: dict[str, Any], metrics: dict[str, float], step: int) -> None:
        """Shows the final metrics beside a run's settings, if the logger has a place for both."""
        self.logger.log_hyperparams(settings)

    def write_table(self, name: str, columns: Columns, rows: int, step: int) -> None:
        """Shows the first rows of a table of texts and numbers."""

    def write_learning_curve(self, name: str, value: float, step: int) -> None:
        """Shows a curve before the others, if the logger orders curves."""

    def write_histogram(self, name: str, values: Tensor, step: int) -> None:
        """Shows how numbers are distributed."""

    def position(self) -> dict[str, Any]:
        """Returns the position up to which data is written, as plain data for a checkpoint."""
        return {}

    def cut(self, position: Mapping[str, Any]) -> None:
        """Removes what was written after a checkpoint, because the resumed run writes it again."""


class TensorBoardAdapter(LoggerAdapter):
    """TensorBoard's HPARAMS, TEXT and HISTOGRAMS tabs. Its event files are cut by ``recipes.callbacks.curves``."""

    def write_settings(self, settings: dict[str, Any]) -> None:
        # Lightning's `log_hyperparams` writes no row of the tab without a metric, and `save` no file a second time.
        from torch.utils.tensorboard.summary import hparams

        _, start, _ = hparams(settings, {})
        self.logger.experiment._get_file_writer().add_summary(start, 0)
        self.logger.hparams.update(settings)
        save_hparams_to_yaml(os.path.join(self.logger.log_dir, self.logger.NAME_HPARAMS_FILE), self.logger.hparams)

    def write_result(self, settings: dict[str, Any], metrics: dict[str, float], step: int) -> None:
        # Lightning's `log_hyperparams` would write a point of each metric's curve too.
        from torch.utils.tensorboard.summary import hparams

        super().write_result(settings, {}, step)
        for summary in hparams(settings, metrics) if metrics else ():
            self.logger.experiment._get_file_writer().add_summary(summary, step)

    def write_table(self, name: str, columns: Columns, rows: int, step: int) -> None:
        self.logger.experiment.add_text(name, markdown_table(columns, rows), step)

    def write_learning_curve(self, name: str, value: float, step: int) -> None:
        # TensorBoard sorts groups by name, opens the first two and shows twelve cards of each.
        # `eval/mean_ep_length` would stand before `eval/mean_reward`.
        tag = name.rpartition("/")[2] if not name.startswith("eval/") else name.replace("/", "_")
        self.logger.experiment.add_scalar(f"curve/{tag}", value, step)

    def write_histogram(self, name: str, values: Tensor, step: int) -> None:
        self.logger.experiment.add_histogram(name, values, step)


class CSVAdapter(LoggerAdapter):
    """Files in ``tables`` beside ``metrics.csv``: a table's rows in ``<name>.jsonl``, bars in ``<name>_bars.csv``."""

    def write_table(self, name: str, columns: Columns, rows: int, step: int) -> None:
        with self._file(f"{name}.jsonl").open("a", encoding="utf-8") as file:
            for values in list(zip(*columns.values(), strict=True))[:rows]:
                row = {"step": step, **dict(zip(columns, values, strict=True))}
                file.write(json.dumps(finite(row), ensure_ascii=False, default=str) + "\n")

    def write_histogram(self, name: str, values: Tensor, step: int) -> None:
        path = self._file(f"{name}_bars.csv")
        counts, edges = torch.histogram(values.detach().float().flatten().cpu(), BARS)
        is_new = not path.exists()
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(["step", "low", "high", "count"])
            bars = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.int().tolist(), strict=True)
            writer.writerows([step, low, high, count] for low, high, count in bars if count)

    def position(self) -> dict[str, Any]:
        self.logger.save()
        rows = 0
        if self._metrics.exists():
            rows = len(_read_rows(self._metrics))
            self._keep_whole()
        sizes = {str(path.relative_to(self._tables)): path.stat().st_size for path in self._written()}
        return {"rows": rows, "sizes": sizes}

    def cut(self, position: Mapping[str, Any]) -> None:
        # Lightning's writer deletes the file and writes it anew: a copy stands beside it until that is done.
        copy = self._metrics.with_suffix(".kept")
        if not copy.exists() and self._metrics.exists():
            part = copy.with_suffix(".part")
            shutil.copyfile(self._metrics, part)
            part.replace(copy)
        kept = _read_rows(copy)[: position.get("rows", 0)] if copy.exists() else []
        for path in self._written():
            size = position.get("sizes", {}).get(str(path.relative_to(self._tables)))
            if size is None:
                path.unlink()
            else:
                with path.open("r+b") as file:
                    file.truncate(size)
        with warnings.catch_warnings():
            # Lightning's writer deletes the curves of a folder that it finds; they are in `kept`.
            warnings.filterwarnings("ignore", "Experiment logs directory")
            writer = self.logger.experiment
        if kept:
            # The file is written by the writer itself, which then knows its header.
            writer.metrics = [{key: value for key, value in row.items() if value != ""} for row in kept]
            writer.save()
            self._keep_whole()
        copy.unlink(missing_ok=True)

    def _keep_whole(self) -> None:
        """Replaces the file in one step: Lightning 2.6 empties it to add a column, and a kill would lose the curves."""
        self.logger.experiment._rewrite_with_new_header = lambda columns: _rewrite(self._metrics, columns)

    @property
    def _metrics(self) -> Path:
        return Path(self.logger.log_dir) / "metrics.csv"

    @property
    def _tables(self) -> Path:
        return Path(self.logger.log_dir) / "tables"

    def _written(self) -> list[Path]:
        return sorted([*self._tables.rglob("*.jsonl"), *self._tables.rglob("*_bars.csv")])

    def _file(self, name: str) -> Path:
        path = self._tables / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class WandbAdapter(LoggerAdapter):
    """Weights & Biases: tables and histograms; a resumed run repeats the points since its checkpoint."""

    def write_table(self, name: str, columns: Columns, rows: int, step: int) -> None:
        import wandb

        data = [list(values) for values in zip(*columns.values(), strict=True)][:rows]
        self._log(name, wandb.Table(columns=list(columns), data=data), step)

    def write_histogram(self, name: str, values: Tensor, step: int) -> None:
        import wandb

        self._log(name, wandb.Histogram(values.detach().float().flatten().cpu().tolist()), step)

    def position(self) -> dict[str, Any]:
        return {"id": self.logger.experiment.id}

    def cut(self, position: Mapping[str, Any]) -> None:
        if "id" in position:
            self.logger._id = position["id"]
            self.logger._wandb_init.update(id=position["id"], resume="allow")

    def _log(self, name: str, value: Any, step: int) -> None:
        self.logger.log_metrics({name: value}, step)


_ADAPTERS: tuple[tuple[type[Logger], type[LoggerAdapter]], ...] = (
    (TensorBoardLogger, TensorBoardAdapter),
    (CSVLogger, CSVAdapter),
    (WandbLogger, WandbAdapter),
)


def adapters(trainer: L.Trainer) -> list[LoggerAdapter]:
    """Returns the adapters of a Trainer's loggers, in their order; none on ranks other than the first."""
    if not trainer.is_global_zero:
        return []
    return [
        next((adapter(logger) for kind, adapter in _ADAPTERS if isinstance(logger, kind)), LoggerAdapter(logger))
        for logger in trainer.loggers
    ]


def log_settings(trainer: L.Trainer) -> None:
    """Writes a run's settings to each logger before its first step, unless ``enable_autolog_hparams`` is false."""
    settings = flat_settings(trainer.lightning_module, getattr(trainer, "datamodule", None))
    for adapter in adapters(trainer) if trainer.enable_autolog_hparams else ():
        adapter.write_settings(settings)


def flat_settings(*owners: Any) -> dict[str, Any]:
    """Returns hyperparameters as TensorBoard takes them, by dotted name, without those of :data:`FILLED_IN`."""
    flat: dict[str, Any] = {}
    for owner in owners:
        _flatten(getattr(owner, "hparams", {}), "", flat)
    return flat


def _flatten(settings: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> None:
    """Adds nested settings to ``flat``."""
    for key, value in settings.items():
        if isinstance(value, dict) and key not in FILLED_IN:
            _flatten(value, f"{prefix}{key}.", flat)
        elif key not in FILLED_IN:
            known = isinstance(value, int | float | str | bool) and not (isinstance(value, float) and math.isnan(value))
            flat[f"{prefix}{key}"] = value if known else str(value)


def _rewrite(path: Path, columns: Sequence[str]) -> None:
    """Gives a CSV file other columns; the file is whole at any moment."""
    rows, part = _read_rows(path), path.with_suffix(".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def _read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def finite(value: Any) -> Any:
    """Replaces NaN and infinite numbers by None, in nested containers too: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


#: Characters with a meaning in Markdown or HTML, as entities.
_ENTITIES = str.maketrans({character: f"&#{ord(character)};" for character in "&<>|`*_[]\\~"})


def markdown_table(columns: Mapping[str, Sequence[Any]], rows: int = 8, width: int = 500) -> str:
    """Formats a Markdown table that shows every text as it is."""
    lines = [f"| {' | '.join(_cell(name, width) for name in columns)} |", f"|{'---|' * len(columns)}"]
    for values in list(zip(*columns.values(), strict=True))[:rows]:
        lines.append(f"| {' | '.join(_cell(value, width) for value in values)} |")
    return "\n".join(lines)


def _cell(value: Any, width: int) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    text = text if len(text) <= width else text[: width - 1] + "…"
    return visible(text).translate(_ENTITIES).replace("\n", "<br>")
