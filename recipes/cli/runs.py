"""The run that a command continues: its folder, its checkpoint, which is verified, and the settings that changed."""

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import dict_to_namespace
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from recipes.run import LOGS, Run, run_name
from rl_modules.common.checkpoint_file import DamagedCheckpoint, damage_of, described, read_checkpoint, require_parts
from rl_modules.common.errors import UsageError
from rl_modules.common.stored_arguments import settings_of
from rl_modules.loggers import FILLED_IN

#: Names that ``--ckpt_path`` takes instead of a path: checkpoints of the newest run.
NAMES = ("last", "previous", "best")
#: What a run needs of a checkpoint to
RESUMABLE = ("state_dict", "global_step", "pytorch-lightning_version")
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
        if logger.init_args.get("name", "") is None:
            logger.init_args.name = configured_name(config)


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
        raise UsageError(f"seed_everything=true draws a seed, which {ranks} processes that torchrun or SLURM started "
                         "don't share; give a number, or set PL_GLOBAL_SEED for all of them")  # fmt: skip
    return int(torch.seed() % 2**31)


def find_checkpoint(
    config: Any, command: str, arguments: list[str], lock: Callable[[Path], Any]
) -> tuple[dict[str, Any] | None, Run | None]:
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
        raise UsageError(f"ckpt_path={given!r} is not a file; give the path of a .ckpt file, or one of "
                         f"{', '.join(NAMES)} for the newest run's")  # fmt: skip
    if resumed is None:
        checkpoint, taken = read(Path(given)), Path(given)
    else:
        checkpoint, taken = read_newest_whole(Path(given))
        config["ckpt_path"] = str(taken)
    if command == "fit" and "optimizer_states" not in checkpoint:
        raise UsageError(f"ckpt_path={str(given)!r} holds weights alone, as save_weights_only writes them, and no run "
                         f"resumes from it; begin one with its weights: --model.init_from {given}, or for a language "
                         "model `rl export`, then --model.model_name_or_path")  # fmt: skip
    return checkpoint, None if resumed is None else Run(resumed.folder, taken)


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


def _resolve(config: Any, command: str, name: str) -> tuple[Path | None, Run | None]:
    """Returns the newest run's checkpoint of that name, and for ``fit`` the run, whose folder the logger gets."""
    folder = _run_folder(config)
    found = None if folder is None else find(folder, name)
    if found is None and not config.get("resume"):
        raise UsageError(f"ckpt_path={name}: there is no {name}.ckpt of this model on this data in "
                         f"{folder or parent_folder(config)}; give a path")  # fmt: skip
    if command != "fit" or folder is None:
        return found, None
    logger = _logger(config)
    if hasattr(logger, "init_args"):
        logger.init_args.version = folder.name
    return found, Run(folder, found)


def _run_folder(config: Any) -> Path | None:
    """Returns the folder of the newest run, or of the given ``version``; None where there is no run."""
    parent = parent_folder(config)
    logger = _logger(config)
    if not hasattr(logger, "init_args"):
        root = _root_folder(config)  # there were the checkpoints of earlier versions, and are those that SLURM requeues
        return newest_run(parent) or (root if (root / "checkpoints").is_dir() else None)
    version = logger.init_args.get("version")
    if logger.class_path.endswith("WandbLogger") and version is None:
        named = logger.init_args.get("id")
        runs = sorted(parent.glob("*/checkpoints"), key=lambda path: path.stat().st_mtime)
        return parent / named if named else runs[-1].parent if runs else None
    if version is None:
        return newest_run(parent)
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
    for line in changes(checkpoint, model, datamodule):
        print(line)


def newest_run(parent: Path) -> Path | None:
    """Returns the newest of a logger's folders, by number, those of SLURM jobs by time; None where there is none."""
    numbered = {int(match.group(1)): path for path in parent.glob("version_*")
                if (match := re.fullmatch(r"version_(\d+)", path.name)) and path.is_dir()}  # fmt: skip
    runs = [path for path in parent.glob("job_*") if path.is_dir()]
    return max([*runs, *([numbered[max(numbered)]] if numbered else [])], key=changed_at, default=None)


def changed_at(run: Path) -> float:
    """Returns the time of the last change of a run's folder or checkpoints, in seconds since the epoch."""
    return max(folder.stat().st_mtime for folder in (run, run / "checkpoints") if folder.is_dir())


def find(folder: Path, name: str) -> Path | None:
    """Returns a run's checkpoint by one of :data:`NAMES`, ``last`` being the newest to resume from; None: none."""
    if name != "last":
        path = folder / "checkpoints" / f"{name}.ckpt"
        return path if path.exists() else None
    candidates = [folder / "checkpoints" / "last.ckpt", *folder.glob("hpc_ckpt_*.ckpt")]
    found = [path for path in candidates if path.exists()] or [
        path for path in [folder / "checkpoints" / "previous.ckpt"] if path.exists()
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read(path: Path) -> dict[str, Any]:
    """Verifies a checkpoint's checksums and loads it; its tensors stay on the disk until they are used."""
    try:
        checkpoint = read_checkpoint(path, None, RESUMABLE)
    except DamagedCheckpoint as error:
        whole = next((other for other in _older(path) if damage_of(other) is None), None)
        named = "previous" if whole is not None and whole.name == "previous.ckpt" else whole
        advice = f"the one before it is whole: resume from it with --ckpt_path {named} ({whole})"
        raise DamagedCheckpoint(f"{error}; {advice if whole else 'no earlier one is whole'}") from error
    if "algorithm" in checkpoint:  # a module of another library may have no hyperparameters
        require_parts(checkpoint, f"ckpt_path={str(path)!r}", ("hyper_parameters",))
    return checkpoint


def read_newest_whole(path: Path) -> tuple[dict[str, Any], Path]:
    """Loads a run's last checkpoint, or the newest whole one before it if that one is damaged, with a warning."""
    try:
        return read(path), path
    except DamagedCheckpoint as error:
        for other in _older(path):
            if damage_of(other) is None:
                checkpoint = read(other)
                rank_zero_warn(f"{str(error).partition(';')[0]}; the run resumes from {other}, the one before it.")
                return checkpoint, other
        raise


def _older(path: Path) -> list[Path]:
    """Returns the other checkpoints in a folder from which a run can resume, the best choice first."""
    folder = path.parent
    kept = sorted(folder.glob("step-*.ckpt"), key=lambda kept: kept.stat().st_mtime, reverse=True)
    others = [folder / "last.ckpt", folder / "previous.ckpt", *kept, folder / "best.ckpt"]
    return [other for other in others if other.exists() and not other.samefile(path) and path.name != "previous.ckpt"]


def changes(checkpoint: dict[str, Any], model: Any, datamodule: Any) -> list[str]:
    """Returns the arguments that differ from the checkpoint's, as ``clip_range: 0.2 → 0.1``."""
    lines = []
    for key, owner in (("hyper_parameters", model), ("datamodule_hyper_parameters", datamodule)):
        saved = settings_of(checkpoint, key)
        for name, value in owner.hparams.items():
            value = described(value)  # as the checkpoint has it
            if name in saved and name not in FILLED_IN and saved[name] != value:
                lines.append(f"{name}: {saved[name]} → {value}")
    return lines
