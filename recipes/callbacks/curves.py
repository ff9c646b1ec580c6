"""A run's folder, and what is in it: its resolved config, TensorBoard's HPARAMS tab, points that a resumed run cuts."""

import re
import struct
from collections.abc import Iterable
from enum import Enum
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from recipes.run_files import Unreadable, require_curves

PATTERN = "events.out.tfevents.*"


def lengths(trainer: L.Trainer) -> dict[str, int]:
    """Returns the length of every event file in bytes, by file name; a checkpoint stores it."""
    if not trainer.is_global_zero:
        return {}
    found: dict[str, int] = {}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
            found.update({path.name: path.stat().st_size for path in Path(logger.log_dir).glob(PATTERN)})
    return found


def cut(files: Iterable[Path], kept: dict[str, int]) -> None:
    """Removes what was logged after a checkpoint from a run's event files."""
    for path in files:
        if path.name not in kept:
            path.unlink()
        elif path.stat().st_size != (size := _whole_records(path, kept[path.name])):
            with path.open("r+b") as file:
                file.truncate(size)


def _whole_records(path: Path, limit: int) -> int:
    """Returns the length of the whole records up to ``limit``; a power cut may leave half a record."""
    end = 0
    with path.open("rb") as file:
        size = min(limit, path.stat().st_size)
        # A record: its length in 8 bytes, their checksum in 4, the data, its checksum in 4.
        while end + 12 <= size:
            file.seek(end)
            (length,) = struct.unpack("<Q", file.read(8))
            if end + 16 + length > size:
                break
            end += 16 + length
    return end


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns every scalar curve of a run, (step, value) by tag, in the order of steps, not of TensorBoard's files."""
    events = _events(folder)
    return {
        tag: sorted(((e.step, e.value) for e in events.Scalars(tag)), key=itemgetter(0))
        for tag in events.Tags()["scalars"]
    }


def seconds(folder: Path) -> float:
    """Returns the seconds between a run's first and last scalar."""
    events = _events(folder)
    times = [event.wall_time for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    return max(times, default=0.0) - min(times, default=0.0)


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    require_curves(folder)
    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    try:
        return events.Reload()
    except Exception as error:  # a damaged file makes TensorBoard raise errors of any kind
        raise Unreadable(folder, f"TensorBoard's files are damaged: {error or type(error).__name__}") from error


def has_no_folder(trainer: L.Trainer) -> bool:
    """Whether no logger gives the run a folder, such as MLflow's with a server: it gets one as without a logger."""
    return not trainer.loggers or trainer.loggers[0].save_dir is None


def log_folder(trainer: L.Trainer) -> Path:
    """Returns the run's own folder for the first rank; ``Trainer.log_dir`` makes all ranks communicate."""
    if has_no_folder(trainer):
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


class ConfigRecord(SaveConfigCallback):
    """Writes the resolved config into the folder of a training run, and into TensorBoard as text.

    The config is not written for evaluations and for runs without a separate folder, because the file would replace a
    user's ``config.yaml``. A resumed run has the text already; it replaces the file only when training starts, because
    until then its checkpoint may refuse the new settings.
    """

    #: Whether the run has a folder to itself without a logger.
    has_folder = False
    #: Whether the run resumes in a folder that holds the config.
    resumes = False

    def __init__(self, parser: Any, config: Any, **arguments: Any) -> None:
        # A run started from the recorded config is a new run, so the record names no checkpoint.
        recorded = config.clone()
        for name, value in (("ckpt_path", None), ("resume", False)):
            if name in recorded:
                recorded[name] = value
        recorded.pop("weights_only", None)  # always true
        loggers = recorded["trainer"]["logger"]
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            settings = getattr(logger, "init_args", {})
            if re.fullmatch(r"version_\d+(_.*)?", str(settings.get("version"))):
                settings["version"] = None  # the number of the folder that is resumed
        super().__init__(parser, _without_enums(recorded), **arguments, save_to_log_dir=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self.resumes:
            super().setup(trainer, pl_module, stage)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.resumes and not self.already_saved:
            super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or (has_no_folder(trainer) and not self.has_folder):
            return
        folder = log_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, str(folder / self.config_filename), skip_none=False, overwrite=True)
        if self.resumes:
            return
        text = self.parser.dump(self.config)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))


def _without_enums(node: Any) -> Any:
    """A config with the values of enumerations, such as Timer's default ``Interval.step``, which YAML can't hold."""
    if isinstance(node, Enum):
        return node.value
    if isinstance(node, Namespace):
        return Namespace({key: _without_enums(value) for key, value in vars(node).items()})
    if isinstance(node, dict):
        return {key: _without_enums(value) for key, value in node.items()}
    return [_without_enums(value) for value in node] if isinstance(node, list) else node
