"""Folders of runs: the folder of a new run, and the run and checkpoint that a resumed run continues."""

import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import dict_to_namespace
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from recipes import language
from recipes.callbacks import curves
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.config_record import ConfigRecord
from recipes.callbacks.log_folder import log_folder
from recipes.callbacks.slurm import requeue_signals
from recipes.cli import resume
from rl_modules.common.errors import UsageError
from rl_modules.loggers import adapters

#: Parent folder of all runs, below ``trainer.default_root_dir``.
LOGS = "logs"
#: The logger of a run that names none.
LOGGER = {
    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
    "init_args": {"save_dir": LOGS, "name": None, "default_hp_metric": False},
}
#: Files of a run that another run in its folder would overwrite or continue.
_OF_A_RUN = ("checkpoints/last.ckpt", curves.PATTERN, "metrics.csv")


def set_folder(config: Any) -> None:
    """Sets the logger's folder to ``<default_root_dir>/logs/<algorithm>-<task>`` unless another is given.

    A logger of null or true, for which Lightning would write to ``lightning_logs``, is replaced by the default logger.
    ``~`` and ``$NAME`` are expanded, which Lightning does for curves but not for checkpoints.
    """
    if config["trainer"]["logger"] in (None, True):
        config["trainer"]["logger"] = dict_to_namespace(LOGGER)
    given = config["trainer"]["logger"]
    root = config["trainer"].get("default_root_dir")
    if root is not None:
        root = config["trainer"]["default_root_dir"] = os.path.expanduser(os.path.expandvars(root))
    for logger in given if isinstance(given, list) else [given]:
        if not hasattr(logger, "init_args"):
            continue
        if isinstance(saves := logger.init_args.get("save_dir"), str | Path):
            logger.init_args.save_dir = os.path.expanduser(os.path.expandvars(saves))
        if root is not None and logger.init_args.get("save_dir") == LOGS:
            logger.init_args.save_dir = str(Path(root) / LOGS)
        if logger.init_args.get("name", "") is None:
            logger.init_args.name = configured_name(config)


def configured_name(config: Any) -> str:
    """Returns the same as :func:`run_name` before the objects exist."""
    algorithm = config["model"]["class_path"].rpartition(".")[2]
    settings = config["data"]["init_args"]
    task = settings.get("env_id") or language.task_name(settings) or config["data"]["class_path"].rpartition(".")[2]
    return re.sub(r"[^\w.-]+", "_", f"{algorithm}-{task}")


def _logger(config: Any) -> Any:
    """Returns the logger whose folder is the run's: the first of several, as in Lightning."""
    given = config["trainer"]["logger"]
    return (given[0] if given else False) if isinstance(given, list) else given


def run_name(algorithm: str, data: Any) -> str:
    """Returns the name of a run's folder, ``<algorithm>-<task>``."""
    task = data.hparams.get("env_id") or language.task_name(data.hparams) or type(data).__name__
    return re.sub(r"[^\w.-]+", "_", f"{algorithm}-{task}")


def drawn_seed() -> int:
    """Draws a random seed, the same on all ranks: ranks that the Trainer starts read it from ``PL_GLOBAL_SEED``."""
    in_job = SLURMEnvironment.detect()
    if "PL_GLOBAL_SEED" in os.environ and (in_job or "LOCAL_RANK" in os.environ):
        return int(os.environ["PL_GLOBAL_SEED"])
    ranks = int(os.environ.get("WORLD_SIZE") or (os.environ.get("SLURM_NTASKS") if in_job else None) or 1)
    if ranks > 1:
        raise UsageError(f"seed_everything=true draws a seed, which {ranks} processes that torchrun or SLURM started "
                         "don't share; give a number, or set PL_GLOBAL_SEED for all of them")  # fmt: skip
    return int(torch.seed() % 2**31)


def find_checkpoint(
    config: Any, command: str, arguments: list[str], lock: Callable[[Path], Any]
) -> tuple[dict[str, Any] | None, resume.Run | None]:
    """Resolves ``--resume`` and names such as ``last`` to a path; reads the checkpoint before anything is written."""
    given = config.get("ckpt_path")
    if command == "fit" and given is None:
        _take_requeued_folder(config, arguments)
    # As in Lightning, `fit` accepts `last` before the first checkpoint is written.
    if command == "fit" and given == "last":
        config["resume"] = True
    resumed = None
    if given in resume.NAMES or config.get("resume"):
        if given is not None and given not in resume.NAMES:
            raise UsageError(f"--resume finds its checkpoint by itself; leave out --ckpt_path {given}, or --resume")
        given, resumed = _resolve(config, command, given or "last")
    if resumed is not None:
        lock(resumed.folder)
    config["ckpt_path"] = None if given is None else str(given)
    if given is None:
        if command == "fit" and resumed is None:
            _require_free_folder(config)
        return None, resumed
    if not Path(given).exists():
        raise UsageError(f"ckpt_path={given!r} is not a file; give the path of a .ckpt file, or one of "
                         f"{', '.join(resume.NAMES)} for the newest run's")  # fmt: skip
    if resumed is None:
        checkpoint, taken = resume.read(Path(given)), Path(given)
    else:
        checkpoint, taken = resume.read_newest_whole(Path(given))
        config["ckpt_path"] = str(taken)
    if command == "fit" and "optimizer_states" not in checkpoint:
        raise UsageError(f"ckpt_path={str(given)!r} holds weights alone, as save_weights_only writes them, and no run "
                         f"resumes from it; begin one with its weights: --model.init_from {given}, or for a language "
                         "model `rl export`, then --model.model_name_or_path")  # fmt: skip
    return checkpoint, None if resumed is None else resume.Run(resumed.folder, taken)


def is_found_again(config: Any) -> bool:
    """Returns whether ``--resume`` finds the run: the folder of a user's own logger is not known in advance."""
    try:
        _parent_folder(config)
    except UsageError:
        return False
    return True


def require_own_folder(trainer: Any, ckpt_path: str | None) -> None:
    """Refuses a new run in the folder of another run, which a user's logger may use for all runs."""
    checkpoints = Checkpoints.of(trainer)
    known = (TensorBoardLogger, CSVLogger, WandbLogger)
    if not trainer.is_global_zero or not trainer.loggers or isinstance(trainer.loggers[0], known):
        return
    if checkpoints is None or not checkpoints.writes or trainer.fast_dev_run:
        return
    last = log_folder(trainer) / "checkpoints" / "last.ckpt"
    if last.exists() and (ckpt_path is None or Path(ckpt_path).resolve().parent != last.resolve().parent):
        raise UsageError(
            f"{last.parent.parent} holds a run, which a new one would overwrite: {type(trainer.loggers[0]).__name__} "
            f"gives both the same name and version; let it count, or continue the run with --ckpt_path {last}"
        )


def _require_free_folder(config: Any) -> None:
    """Refuses a new run in a folder that is named by its version and holds a run's checkpoints or curves already."""
    logger = _logger(config)
    if not str(getattr(logger, "class_path", "")).endswith(("TensorBoardLogger", "CSVLogger")):
        return
    folder = _run_folder(config) if logger.init_args.get("version") is not None else None
    if folder is not None and any(next(folder.glob(name), None) for name in _OF_A_RUN):
        raise UsageError(f"{folder} holds a run, which a new one would overwrite; continue it with --resume, or give "
                         "another trainer.logger.init_args.version (null: the next number)")  # fmt: skip


def _take_requeued_folder(config: Any, arguments: list[str]) -> None:
    """In a SLURM job, names the run's folder after the job, so that the requeued job finds its run and resumes it.

    With ``--resume`` a job of another number, which has no such folder, continues the newest run: of the same command
    if there is one.
    """
    logger = _logger(config)
    is_tensorboard = str(getattr(logger, "class_path", "")).endswith("TensorBoardLogger")
    if is_tensorboard and SLURMEnvironment.detect() and logger.init_args.get("version") is None:
        command = f"{zlib.crc32(' '.join(word for word in arguments if word != '--resume').encode()):08x}"
        parent = _parent_folder(config)
        folder = parent / f"job_{os.environ['SLURM_JOB_ID']}_{command}"
        if config.get("resume") and not folder.is_dir():
            same = sorted(parent.glob(f"job_*_{command}"), key=resume.changed_at)
            folder = same[-1] if same else resume.newest_run(parent) or folder
        logger.init_args.version = folder.name
        config["trainer"]["default_root_dir"] = config["trainer"]["default_root_dir"] or str(folder)
        config["resume"] = folder.is_dir()


def _resolve(config: Any, command: str, name: str) -> tuple[Path | None, resume.Run | None]:
    """Returns the newest run's checkpoint of that name, and for ``fit`` the run, whose folder the logger gets."""
    folder = _run_folder(config)
    found = None if folder is None else resume.find(folder, name)
    if found is None and not config.get("resume"):
        raise UsageError(f"ckpt_path={name}: there is no {name}.ckpt of this model on this data in "
                         f"{folder or _parent_folder(config)}; give a path")  # fmt: skip
    if command != "fit" or folder is None:
        return found, None
    logger = _logger(config)
    if hasattr(logger, "init_args"):
        logger.init_args.version = folder.name
    return found, resume.Run(folder, found)


def _run_folder(config: Any) -> Path | None:
    """Returns the folder of the newest run, or of the given ``version``; None where there is no run."""
    parent = _parent_folder(config)
    logger = _logger(config)
    if not hasattr(logger, "init_args"):
        root = _root_folder(config)  # there were the checkpoints of earlier versions, and are those that SLURM requeues
        return resume.newest_run(parent) or (root if (root / "checkpoints").is_dir() else None)
    version = logger.init_args.get("version")
    if logger.class_path.endswith("WandbLogger") and version is None:
        named = logger.init_args.get("id")
        runs = sorted(parent.glob("*/checkpoints"), key=lambda path: path.stat().st_mtime)
        return parent / named if named else runs[-1].parent if runs else None
    if version is None:
        return resume.newest_run(parent)
    return parent / (version if isinstance(version, str) else f"version_{version}")


def _parent_folder(config: Any) -> Path:
    logger = _logger(config)
    if logger in (False, None):
        return _root_folder(config) / LOGS / configured_name(config)
    settings = getattr(logger, "init_args", None)
    if settings is not None and logger.class_path.endswith("WandbLogger"):
        return Path(settings.save_dir or ".") / (settings.project or "lightning_logs")
    if settings is None or not logger.class_path.endswith(("TensorBoardLogger", "CSVLogger")):
        raise UsageError("the newest run is found by the folders of TensorBoardLogger, CSVLogger and WandbLogger; with "
                         "another logger give --ckpt_path PATH")  # fmt: skip
    return Path(settings.save_dir) / (settings.name or "")


def _root_folder(config: Any) -> Path:
    return Path(config["trainer"]["default_root_dir"] or ".")


def announce(checkpoint: dict[str, Any], path: str, model: Any, datamodule: Any) -> None:
    """Prints which checkpoint a run resumes from, and the settings that differ from the checkpoint's."""
    done = checkpoint.get(type(datamodule).__qualname__, {}).get("num_timesteps")
    at = f"{done:,} transitions" if done is not None else f"step {checkpoint['global_step']:,}"
    print(f"resuming from {path} ({at})")
    for line in resume.changes(checkpoint, model, datamodule):
        print(line)


def continue_folder(run: resume.Run, checkpoint: dict[str, Any] | None, trainer: Any) -> None:
    """Prepares the folder of a resumed run: its curves end at the checkpoint, its config is not written again."""
    if run.checkpoint is None and trainer.is_global_zero:
        print(f"{run.folder} has no checkpoint yet: its run starts again")
    for callback in trainer.callbacks:
        if isinstance(callback, ConfigRecord):
            callback.resumes = checkpoint is not None
        if isinstance(callback, Checkpoints):
            callback.last_path = run.checkpoint
    states = (checkpoint or {}).get("callbacks", {})
    written = states.get("Checkpoints", {})
    if run.checkpoint is None or len(written.get("loggers", [])) == len(trainer.loggers):
        for logger in _unnumbered(trainer):
            logger._version = run.folder.name
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            curves.cut(Path(logger.log_dir), written.get("curves", {}))
    own = adapters(trainer)
    positions = written.get("loggers", [])
    for adapter, position in zip(own, positions if len(positions) == len(own) else [{}] * len(own), strict=True):
        adapter.cut(position)


def number_alike(trainer: Any) -> Path | None:
    """Gives all loggers of a new run the same version number, by which a resumed run finds their folders. Returns the
    folder that this process made for the run; None: none.

    The first rank makes the folder at once, so that runs that start together have different folders. A process that
    starts the ranks calls this before it starts them; otherwise its folder would differ from theirs.
    """
    if not (loggers := _unnumbered(trainer)) or (len(trainer.loggers) < 2 and not trainer.is_global_zero):
        return None
    made = None
    number = getattr(trainer.loggers[0], "_version", None)  # the run's folder, if it has a name already
    if number is None:
        number = max(logger._get_next_version() for logger in loggers)
        if trainer.is_global_zero and "://" not in str(loggers[0].root_dir):
            number = _claimed(Path(loggers[0].root_dir), number)
            made = Path(loggers[0].root_dir) / f"version_{number}"
    for logger in loggers:
        logger._version = number
    return made


def remove_unused(folder: Path) -> None:
    """Removes the folder of a run that was refused before it began, which ``--resume`` would take for the newest run.
    A folder that holds weights is left.
    """
    if not any(next(folder.rglob(pattern), None) for pattern in ("*.ckpt", "*.pt")):
        shutil.rmtree(folder, ignore_errors=True)


def place_without_logger(trainer: Any, name: str, run: resume.Run | None = None) -> Path | None:
    """Gives a run without a logger a folder of its own, numbered as a logger does: runs that share one would overwrite
    each other's checkpoints.
    """
    checkpoints = Checkpoints.of(trainer)
    writes = checkpoints is not None and checkpoints.writes and not trainer.fast_dev_run
    if trainer.loggers or not writes or not trainer.is_global_zero or requeue_signals(trainer):
        return None
    if run is None and "://" in str(trainer.default_root_dir):
        return None
    folder = _new_folder(Path(trainer.default_root_dir) / LOGS / name) if run is None else run.folder
    trainer._default_root_dir = str(folder)
    for callback in trainer.callbacks:
        if isinstance(callback, ConfigRecord):
            callback.has_folder = True
    return folder


def _new_folder(parent: Path) -> Path:
    names = (path.name.removeprefix("version_") for path in parent.glob("version_*"))
    number = max((int(name) for name in names if name.isdigit()), default=-1) + 1
    return parent / f"version_{_claimed(parent, number)}"


def open_csv_files(trainer: Any) -> None:
    """Makes CSV loggers open their files while the folder of a new run is empty. Lightning would treat files in it,
    such as the run's own config, as an older run's, and warn that it deletes them.
    """
    for logger in trainer.loggers if trainer.is_global_zero else []:
        if isinstance(logger, CSVLogger):
            logger.experiment  # noqa: B018


def local_folder(trainer: Any) -> Path | None:
    """Returns the run's own folder on this machine's disk; None where nothing is logged there."""
    logger = trainer.loggers[0] if trainer.loggers else None
    if not isinstance(logger, TensorBoardLogger | CSVLogger) or "://" in str(logger.log_dir):
        return None
    return Path(logger.log_dir)


def _claimed(parent: Path, number: int) -> int:
    """Makes the folder ``version_<number>``, or the next one that no other process has made; returns its number."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            (parent / f"version_{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return number


def _unnumbered(trainer: Any) -> list[Any]:
    """Returns the loggers that number their folders and have none yet."""
    kinds = (TensorBoardLogger, CSVLogger)
    return [logger for logger in trainer.loggers if isinstance(logger, kinds) and logger._version is None]
