"""A run's folder, and TensorBoard's files in it: the HPARAMS tab, and points that a resumed run cuts."""

import struct
from collections.abc import Collection
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

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


def cut(folder: Path, kept: dict[str, int]) -> None:
    """Removes what was logged after a checkpoint from a run's event files."""
    for path in folder.glob(PATTERN):
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

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    return events.Reload()


def log_folder(trainer: L.Trainer) -> Path:
    """Returns the run's own folder for the first rank; ``Trainer.log_dir`` makes all ranks communicate."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


def write_hparams(
    logger: TensorBoardLogger, settings: dict[str, Any], chosen: Collection[str], metrics: dict[str, float], step: int
) -> None:
    """Writes a run's row of the HPARAMS tab, with the ``chosen`` settings first, and its metrics as points."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    logger.log_metrics(metrics, step)
    experiment, start, end = hparams(settings, metrics)
    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name in chosen
    plugin.content = data.SerializeToString()
    for summary in (experiment, start, end):
        logger.experiment._get_file_writer().add_summary(summary, step)
