"""One run under ``rl fit`` and ``recipes.Trainer``: its name, folder, lock, progress and end."""

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from datamodules.base import ControlDataModule
from recipes.callbacks import curves
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.curves import ConfigRecord, log_folder
from recipes.callbacks.progress import ProgressLines, StepProgressBar, TransitionProgressBar
from recipes.signals import requeue_signals
from rl_modules.common.errors import UsageError
from rl_modules.loggers import adapters

if TYPE_CHECKING:
    from recipes.trainer import Trainer


#: Parent folder of all runs, below ``trainer.default_root_dir``.
LOGS = "logs"
#: Longest part of a folder's name that says what is special about a run.
MOST_LETTERS = 80
#: File of a run's folder that a process which trains in it holds.
LOCK = "run.lock"
#: File of a run's folder with the step at which its training came to its end, which an unfinished run lacks.
END = "ended_at"


@dataclass(frozen=True)
class SavedRun:
    """A run's folder and its checkpoint; None if the run was stopped before it wrote one."""

    folder: Path
    checkpoint: Path | None


def run_name(algorithm: str, settings: Any, otherwise: str) -> str:
    """Returns ``<algorithm>-<task>``, the name of a run's folder, without characters that a file system may refuse."""
    named = {key: settings.get(key) for key in ("env_id", "task", "path", "dataset")}
    key, task = next(((key, value) for key, value in named.items() if value), ("", otherwise))
    task = "mixture" if isinstance(task, list) else Path(task).stem if key == "path" else str(task)
    # The description of a Dataset ends with its fingerprint.
    task = re.sub(r", [0-9a-f]{8,}$", "", task) if key == "dataset" else task
    return re.sub(r"[^\w.-]+", "_", f"{algorithm}-{task}")


def plain_name(text: str) -> str:
    """Returns a text as part of a folder's name."""
    return re.sub(r"[^\w.,=+-]+", "_", text)[:MOST_LETTERS]


def suffix_of(trainer: "Trainer", parent: Path) -> str:
    """Returns what a new run's folder has after its number: ``run_name``, or what was changed beside earlier runs."""
    named = trainer.run_name
    if named is None and any(parent.glob("version_*")):
        named = trainer.changed
    return f"_{plain_name(named)}" if named else ""


def begin(trainer: "Trainer", name: str, run: SavedRun | None = None) -> tuple[list[Path], Path | None]:
    """Gives a run its folder, at once; returns the folders that are its own, and the one on this machine's disk."""
    made, placed = number_alike(trainer), place_without_logger(trainer, name, run)
    logger = trainer.loggers[0] if trainer.loggers else None
    is_here = isinstance(logger, TensorBoardLogger | CSVLogger) and "://" not in str(logger.log_dir)
    here = Path(str(logger.log_dir)) if is_here else None  # type: ignore[union-attr]
    return made or ([placed] if placed is not None and run is None else []), placed or here


def number_alike(trainer: "Trainer") -> list[Path]:
    """Gives all loggers of a new run one version number; returns their new folders."""
    # The first rank makes it now, because runs may start together, and ranks that are started later take it.
    if not (loggers := _unnumbered(trainer)) or (len(trainer.loggers) < 2 and not trainer.is_global_zero):
        return []
    made = []
    version = getattr(trainer.loggers[0], "_version", None)  # the run's folder, if it has a name already
    if version is None:
        version = max(logger._get_next_version() for logger in loggers)
        if trainer.is_global_zero and "://" not in str(loggers[0].root_dir):
            parent = Path(loggers[0].root_dir)
            folder = _claimed(parent, version, suffix_of(trainer, parent))
            version = folder if folder.count("_") > 1 else int(folder.removeprefix("version_"))
            made = [Path(logger.root_dir) / folder for logger in loggers if "://" not in str(logger.root_dir)]
    for logger in loggers:
        logger._version = version
    return made


def _unnumbered(trainer: "Trainer") -> list[Any]:
    """Returns the loggers that number their folders and have none yet."""
    kinds = (TensorBoardLogger, CSVLogger)
    return [logger for logger in trainer.loggers if isinstance(logger, kinds) and logger._version is None]


def _claimed(parent: Path, number: int, suffix: str) -> str:
    """Makes the folder ``version_<number><suffix>`` with a number that no other process has taken; returns its name."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / f"version_{number}"
        try:
            folder.mkdir()  # one process makes it, whatever its suffix
        except FileExistsError:
            number += 1
            continue
        if any(parent.glob(f"version_{number}_*")):
            folder.rmdir()
            number += 1
            continue
        return folder.rename(f"{folder}{suffix}").name


def require_own_folder(trainer: L.Trainer, ckpt_path: str | None) -> None:
    """Refuses a new run in the folder of another run: a named version, or one that a user's logger uses for all."""
    logger = (
        trainer.loggers[0]
        if trainer.loggers and trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False)
        else None
    )
    if (
        logger is None
        or logger.save_dir is None
        or isinstance(logger, WandbLogger)
        or getattr(logger, "_version", "") is None
    ):
        return
    folder = log_folder(trainer)
    is_used = any(next(folder.glob(name), None) for name in ("checkpoints/last.ckpt", curves.PATTERN, "metrics.csv"))
    if is_used and (ckpt_path is None or Path(ckpt_path).resolve().parent != (folder / "checkpoints").resolve()):
        raise UsageError(
            f"{folder} holds a run, which a new one would overwrite; continue it with --resume or "
            f"--ckpt_path {folder / 'checkpoints' / 'last.ckpt'}, or give the logger another version "
            "(null: the next number)"
        )


def place_without_logger(trainer: "Trainer", name: str, run: SavedRun | None = None) -> Path | None:
    """Gives a run without a logger, or whose logger has no folder here, a numbered folder of its own."""
    checkpoints = Checkpoints.of(trainer)
    writes = checkpoints is not None and checkpoints.writes and not getattr(trainer, "fast_dev_run", False)
    if not curves.has_no_folder(trainer) or not writes or not trainer.is_global_zero or requeue_signals(trainer):
        return None
    if run is None and "://" in str(trainer.default_root_dir):
        return None
    parent = Path(trainer.default_root_dir) / LOGS / name
    folder = _new_folder(parent, suffix_of(trainer, parent)) if run is None else run.folder
    trainer._default_root_dir = str(folder)
    for callback in trainer.callbacks:
        if isinstance(callback, ConfigRecord):
            callback.has_folder = True
    return folder


def _new_folder(parent: Path, suffix: str) -> Path:
    numbers = (path.name.split("_")[1] for path in parent.glob("version_*"))
    number = max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
    return parent / _claimed(parent, number, suffix)


def continue_folder(run: SavedRun, checkpoint: dict[str, Any] | None, trainer: Any) -> None:
    """Prepares the folder of a resumed run: its curves end at the checkpoint, its config is not written again."""
    if run.checkpoint is None and trainer.is_global_zero:
        print(f"{run.folder} has no checkpoint yet: its run starts again")
    for callback in trainer.callbacks:
        if isinstance(callback, ConfigRecord):
            callback.resumes = checkpoint is not None
    states = (checkpoint or {}).get("callbacks", {})
    written = states.get("Checkpoints", {})
    if run.checkpoint is None or len(written.get("loggers", [])) == len(trainer.loggers):
        for logger in _unnumbered(trainer):
            logger._version = run.folder.name
    files = [
        file
        for logger in trainer.loggers
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero
        for file in Path(logger.log_dir).glob(curves.PATTERN)
    ]
    if checkpoint is None:
        curves.cut(files, {})
    elif (checkpoints := Checkpoints.of(trainer)) is not None:
        checkpoints.to_cut = files
    own = adapters(trainer)
    positions = written.get("loggers", [])
    for adapter, position in zip(own, positions if len(positions) == len(own) else [{}] * len(own), strict=True):
        adapter.cut(position)


def note_end(trainer: L.Trainer, step: int) -> None:
    """Notes in a run's folder that its training came to its end."""
    logger = trainer.loggers[0] if trainer.loggers and trainer.is_global_zero else None
    if isinstance(logger, TensorBoardLogger | CSVLogger) and (folder := Path(str(logger.log_dir))).is_dir():
        (folder / END).write_text(f"{step}\n")


def remove_unused(folders: Iterable[Path]) -> None:
    """Removes the folders of a run that was refused before it began, unless they hold weights."""
    for folder in folders:
        if not any(next(folder.rglob(pattern), None) for pattern in ("*.ckpt", "*.pt")):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run's folder by a POSIX lock, which processes that outlive a killed run do not keep; or not at all."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays: a process that has opened it would lock a file that is there no longer.
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UsageError(
                f"another process trains the run in {folder}; stop it first, or leave out --resume for a new run"
            ) from error
        except OSError:
            pass
        yield


def bar_of(data: L.LightningDataModule) -> TransitionProgressBar:
    """Returns the progress bar of a datamodule's runs."""
    return TransitionProgressBar() if isinstance(data, ControlDataModule) else StepProgressBar()


def show_lines(trainer: "Trainer", data: Any) -> None:
    """Makes a run without a terminal print its progress as lines."""
    if (checkpoints := Checkpoints.of(trainer)) is not None:
        checkpoints.progress = ProgressLines(bar_of(data))
