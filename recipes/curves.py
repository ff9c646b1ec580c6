"""TensorBoard's files when a run goes on: what was written after the checkpoint will be written again."""

import struct
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

PATTERN = "events.out.tfevents.*"


def lengths(trainer: L.Trainer) -> dict[str, int]:
    """How long every event file is now, in bytes by file name; kept in a checkpoint.

    Everything logged so far is written out first, so that the files end with a whole record.
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
    """Take from a run's event files what was logged after a checkpoint.

    Args:
        folder: where the event files are.
        kept: what :func:`lengths` returned when the checkpoint was written; files that are not in it go.
    """
    for path in folder.glob(PATTERN):
        if path.name not in kept:
            path.unlink()
        elif path.stat().st_size != (size := _whole_records(path, kept[path.name])):
            with path.open("r+b") as file:
                file.truncate(size)


def _whole_records(path: Path, limit: int) -> int:
    """Bytes up to ``limit`` that are whole records; a machine that lost power may have written half of one."""
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
    """Every scalar of a run as TensorBoard reads it: (step, value) by tag, in the order of the files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
