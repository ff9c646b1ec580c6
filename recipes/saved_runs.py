"""Finds the newest run in a folder, and reads the newest whole checkpoint of a run."""

import glob
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rl_modules.common.errors import UsageError
from rl_modules.common.stored_arguments import settings_of
from rl_modules.core.checkpoint_file import DamagedCheckpoint, damage_of, described, read_checkpoint, require_parts
from rl_modules.loggers import FILLED_IN

#: Names of a run's checkpoints.
NAMES = ("last", "previous", "best")
#: Parts of a checkpoint without which no run resumes.
RESUMABLE = ("state_dict", "global_step", "pytorch-lightning_version")


def newest_run(parent: Path, named: str = "") -> Path | None:
    """Returns the newest of a logger's folders, by number, those of SLURM jobs by time; None where there is none. With
    ``named`` one of this ``run_name``.

    A folder without a checkpoint, as a run that failed early leaves it, is taken only where no other has one.
    """
    numbered = {
        int(match.group(1)): path
        for path in parent.glob(f"version_*_{glob.escape(named)}" if named else "version_*")
        if (match := re.fullmatch(r"version_(\d+)(_.*)?", path.name)) and path.is_dir()
    }
    in_order = [numbered[number] for number in sorted(numbered)]
    jobs = [path for path in parent.glob("job_*") if path.is_dir() and not named]

    def newest(is_run: Callable[[Path], Any]) -> Path | None:
        last = next(filter(is_run, reversed(in_order)), None)
        return max([*filter(is_run, jobs), *([last] if last else [])], key=changed_at, default=None)

    latest, found = newest(Path.is_dir), newest(lambda run: find(run, "last"))
    if found is not None and found != latest:
        rank_zero_warn(f"{latest} has no checkpoint; the newest run that has one is {found}.")
    return found or latest


def changed_at(run: Path) -> float:
    """Returns the time of the last change of a run's folder or checkpoints, in seconds since the epoch."""
    return max(folder.stat().st_mtime for folder in (run, run / "checkpoints") if folder.is_dir())


def find(folder: Path, name: str) -> Path | None:
    """Returns a run's checkpoint by one of :data:`NAMES`, ``last`` being the newest to resume from; None: none.

    A run with a user's ``ModelCheckpoint`` alone has files of other names.
    """
    if name != "last":
        path = folder / "checkpoints" / f"{name}.ckpt"
        return path if path.exists() else None
    written = list(folder.glob("checkpoints/*.ckpt"))
    last = [path for path in written if path.name == "last.ckpt"] + list(folder.glob("hpc_ckpt_*.ckpt"))
    previous = [path for path in written if path.name == "previous.ckpt"]
    others = [path for path in written if path.name not in ("best.ckpt", "next.ckpt")]
    return max(last or previous or others, key=lambda path: path.stat().st_mtime, default=None)


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


def require_optimizer(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuses a checkpoint of weights alone."""
    if "optimizer_states" not in checkpoint:
        raise UsageError(
            f"ckpt_path={str(path)!r} holds weights alone, as save_weights_only writes them, and no run "
            f"resumes from it; begin one with its weights: --model.init_from {path}, or for a language "
            "model `rl export`, then --model.model_name_or_path"
        )


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


def announce(checkpoint: dict[str, Any], path: Any, model: Any, data: Any) -> None:
    """Prints which checkpoint a run resumes from, and the settings that differ: ``clip_range: 0.2 → 0.1``."""
    done = checkpoint.get(type(data).__qualname__, {}).get("num_timesteps")
    at = f"{done:,} transitions" if done is not None else f"step {checkpoint['global_step']:,}"
    print(f"resuming from {path} ({at})")
    for key, owner in (("hyper_parameters", model), ("datamodule_hyper_parameters", data)):
        saved = settings_of(checkpoint, key)
        for name, value in owner.hparams.items():
            value = described(value)  # as the checkpoint has it
            if name in saved and name not in FILLED_IN and saved[name] != value:
                print(f"{name}: {saved[name]} → {value}")
