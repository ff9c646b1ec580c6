"""TensorBoard's event files of a resumed run: points after the checkpoint are removed; the run writes them again."""

import struct
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

PATTERN = "events.out.tfevents.*"


def lengths(trainer: L.Trainer) -> dict[str, int]:
    """Returns the length of every event file in bytes, by file name; a checkpoint stores it.

    Flushes the loggers first, so that the files end with a whole record.
    """
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
    """Returns every scalar curve of a run: (step, value) by tag, in the order of the steps.

    TensorBoard reads a run's files in the order of their names, which is not that of time within one second.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    return {
        tag: sorted(((e.step, e.value) for e in events.Scalars(tag)), key=itemgetter(0))
        for tag in events.Tags()["scalars"]
    }
