"""The run that a command's settings name: its folder, and the checkpoint that it continues, which is verified."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import dict_to_namespace
from lightning.fabric.plugins.environments import SLURMEnvironment

from recipes.run import LOGS, SavedRun, plain_name, run_name
from recipes.saved_runs import NAMES, changed_at, find, newest_run, read, read_newest_whole, require_optimizer
from rl_modules.common.errors import UsageError

#: The logger of a run that names none.
LOGGER = {
    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
    "init_args": {"save_dir": LOGS, "name": None, "default_hp_metric": False},
}


def set_folder(config: Any) -> None:
    """Sets the logger's folder to ``<default_root_dir>/logs/<algorithm>-<task>`` unless another is given."""
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
        named = config.get("run_name")
        if logger.init_args.get("name", "") is None:
            in_folders = logger.class_path.endswith(("TensorBoardLogger", "CSVLogger"))
            logger.init_args.name = configured_name(config) if in_folders else named or configured_name(config)
        if logger.init_args.get("run_name", "") is None:  # MLflow's
            logger.init_args.run_name = named


def configured_name(config: Any) -> str:
    """Returns the name of a run's folder before its objects exist."""
    algorithm, data = (config[group]["class_path"].rpartition(".")[2] for group in ("model", "data"))
    return run_name(algorithm, config["data"]["init_args"], data)


def _logger(config: Any) -> Any:
    """Returns the logger whose folder is the run's: the first of several, as in Lightning."""
    given = config["trainer"]["logger"]
    return (given[0] if given else False) if isinstance(given, list) else given


def drawn_seed() -> int:
    """Draws a random seed, the same on all ranks: ranks that the Trainer starts read it from ``PL_GLOBAL_SEED``."""
    in_job = SLURMEnvironment.detect()
    if "PL_GLOBAL_SEED" in os.environ and (in_job or "LOCAL_RANK" in os.environ):
        return int(os.environ["PL_GLOBAL_SEED"])
    ranks = int(os.environ.get("WORLD_SIZE") or (os.environ.get("SLURM_NTASKS") if in_job else None) or 1)
    if ranks > 1:
        raise UsageError(
            f"seed_everything=true draws a seed, which {ranks} processes that torchrun or SLURM started "
            "don't share; give a number, or set PL_GLOBAL_SEED for all of them"
        )
    return int(torch.seed() % 2**31)


def find_checkpoint(
    config: Any, command: str, arguments: list[str], lock: Callable[[Path], Any]
) -> tuple[dict[str, Any] | None, SavedRun | None]:
    """Resolves ``--resume`` and names such as ``last`` to a path; reads the checkpoint before anything is written."""
    given = config.get("ckpt_path")
    if command == "fit" and given is None:
        _take_requeued_folder(config, arguments)
    # As in Lightning, `fit` accepts `last` before the first checkpoint is written.
    if command == "fit" and given == "last":
        config["resume"] = True
    resumed = None
    if given in NAMES or config.get("resume"):
        if given is not None and given not in NAMES:
            raise UsageError(f"--resume finds its checkpoint by itself; leave out --ckpt_path {given}, or --resume")
        given, resumed = _resolve(config, command, given or "last")
    if resumed is not None:
        lock(resumed.folder)
    config["ckpt_path"] = None if given is None else str(given)
    if given is None:
        return None, resumed
    if not Path(given).exists():
        raise UsageError(
            f"ckpt_path={given!r} is not a file; give the path of a .ckpt file, or one of "
            f"{', '.join(NAMES)} for the newest run's"
        )
    if resumed is None:
        checkpoint, taken = read(Path(given)), Path(given)
    else:
        checkpoint, taken = read_newest_whole(Path(given))
        config["ckpt_path"] = str(taken)
    if command == "fit":
        require_optimizer(checkpoint, given)
    return checkpoint, None if resumed is None else SavedRun(resumed.folder, taken)


def is_found_again(config: Any) -> bool:
    """Returns whether ``--resume`` finds the run: the folder of a user's own logger is not known in advance."""
    try:
        parent_folder(config)
    except UsageError:
        return False
    return True


def _take_requeued_folder(config: Any, arguments: list[str]) -> None:
    """In a SLURM job, names the run's folder after the job, so that the requeued job resumes it."""
    logger = _logger(config)
    is_tensorboard = str(getattr(logger, "class_path", "")).endswith("TensorBoardLogger")
    if is_tensorboard and SLURMEnvironment.detect() and logger.init_args.get("version") is None:
        command = f"{zlib.crc32(' '.join(word for word in arguments if word != '--resume').encode()):08x}"
        parent = parent_folder(config)
        folder = parent / f"job_{os.environ['SLURM_JOB_ID']}_{command}"
        if config.get("resume") and not folder.is_dir():
            same = sorted(parent.glob(f"job_*_{command}"), key=changed_at)
            folder = same[-1] if same else newest_run(parent) or folder
        logger.init_args.version = folder.name
        config["trainer"]["default_root_dir"] = config["trainer"]["default_root_dir"] or str(folder)
        config["resume"] = folder.is_dir()


def _resolve(config: Any, command: str, name: str) -> tuple[Path | None, SavedRun | None]:
    """Returns the newest run's checkpoint of that name, and for ``fit`` the run, whose folder the logger gets."""
    folder = _run_folder(config)
    found = None if folder is None else find(folder, name)
    if found is None and not config.get("resume"):
        raise UsageError(
            f"ckpt_path={name}: there is no {name}.ckpt of this model on this data in "
            f"{folder or parent_folder(config)}; give a path"
        )
    if command != "fit" or folder is None:
        return found, None
    logger = _logger(config)
    if hasattr(logger, "init_args"):
        logger.init_args.version = folder.name
    return found, SavedRun(folder, found)


def _run_folder(config: Any) -> Path | None:
    """Returns the folder of the newest run, or of the given ``version``; None where there is no run."""
    parent, named = parent_folder(config), plain_name(config.get("run_name") or "")
    logger = _logger(config)
    if not hasattr(logger, "init_args"):
        root = _root_folder(config)  # there were the checkpoints of earlier versions, and are those that SLURM requeues
        return newest_run(parent, named) or (root if (root / "checkpoints").is_dir() else None)
    version = logger.init_args.get("version")
    if logger.class_path.endswith("WandbLogger") and version is None:
        named = logger.init_args.get("id")
        runs = sorted(parent.glob("*/checkpoints"), key=lambda path: path.stat().st_mtime)
        return parent / named if named else runs[-1].parent if runs else None
    if version is None:
        return newest_run(parent, named)
    return parent / (version if isinstance(version, str) else f"version_{version}")


def parent_folder(config: Any) -> Path:
    """Returns the folder of all runs of the model on the data."""
    logger = _logger(config)
    if logger in (False, None):
        return _root_folder(config) / LOGS / configured_name(config)
    settings = getattr(logger, "init_args", None)
    if settings is not None and logger.class_path.endswith("WandbLogger"):
        return Path(settings.save_dir or ".") / (settings.project or "lightning_logs")
    if settings is None or not logger.class_path.endswith(("TensorBoardLogger", "CSVLogger")):
        raise UsageError(
            "the newest run is found by the folders of TensorBoardLogger, CSVLogger and WandbLogger; with "
            "another logger give --ckpt_path PATH"
        )
    return Path(settings.save_dir) / (settings.name or "")


def _root_folder(config: Any) -> Path:
    return Path(config["trainer"]["default_root_dir"] or ".")
