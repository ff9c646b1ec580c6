"""Finds the run to resume, verifies its checkpoint, and lists the changed settings."""

import pickle
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_modules.common.arguments import settings_of
from rl_modules.common.checkpoint_file import require_parts
from rl_modules.common.errors import UsageError
from rl_modules.common.storable import described
from rl_modules.loggers import FILLED_IN

#: Names that ``--ckpt_path`` takes instead of a path: checkpoints of the newest run.
NAMES = ("last", "previous", "best")


@dataclass(frozen=True)
class Run:
    """A run's folder and its checkpoint; None if the run was stopped before it wrote one."""

    folder: Path
    checkpoint: Path | None


def newest_run(parent: Path) -> Path | None:
    """Returns the newest of a logger's folders; None where there is none.

    Of ``version_0``, ``version_1``, … it is the last; folders of SLURM jobs are compared with it by the time of their
    last checkpoint.
    """
    numbered = {int(match.group(1)): path for path in parent.glob("version_*")
                if (match := re.fullmatch(r"version_(\d+)", path.name)) and path.is_dir()}  # fmt: skip
    runs = [path for path in parent.glob("job_*") if path.is_dir()]
    return max([*runs, *([numbered[max(numbered)]] if numbered else [])], key=changed_at, default=None)


def changed_at(run: Path) -> float:
    """Returns the time of the last change of a run's folder or checkpoints, in seconds since the epoch."""
    return max(folder.stat().st_mtime for folder in (run, run / "checkpoints") if folder.is_dir())


def find(folder: Path, name: str) -> Path | None:
    """Returns a run's checkpoint by its name, one of :data:`NAMES`; None where there is none.

    ``last`` is the newest from which the run can resume: a checkpoint written for a SLURM queue counts, and if the
    renaming of ``last.ckpt`` was interrupted, ``previous.ckpt`` is used.
    """
    if name != "last":
        path = folder / "checkpoints" / f"{name}.ckpt"
        return path if path.exists() else None
    candidates = [folder / "checkpoints" / "last.ckpt", *folder.glob("hpc_ckpt_*.ckpt")]
    found = [path for path in candidates if path.exists()] or [
        path for path in [folder / "checkpoints" / "previous.ckpt"] if path.exists()
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read(path: Path) -> dict[str, Any]:
    """Verifies a checkpoint's checksums and loads it; its tensors stay on the disk until they are used.

    Raises:
        UsageError: the file is damaged, no checkpoint, or holds code. Names the checkpoint before it if that one is
            whole.
    """
    if path.is_dir():
        raise UsageError(f"the checkpoint {path} is a folder, as Lightning's sharded strategies write it; its index is "
                         "a pickle, which could run code: give a .ckpt file that this project wrote")  # fmt: skip
    damage = damage_of(path)
    if damage is None:
        try:
            checkpoint = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            parts = ("state_dict", "global_step", "pytorch-lightning_version")
            require_parts(checkpoint, path, "ckpt_path", parts)
            if "algorithm" in checkpoint:  # a module of another library may have no hyperparameters
                require_parts(checkpoint, path, "ckpt_path", ("hyper_parameters",))
            return checkpoint
        except UsageError:
            raise
        except pickle.UnpicklingError as error:
            code = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"(?:class|function) ([\w.]+)", str(error))
            if code is not None:
                raise UsageError(
                    f"{path} holds code, {code.group(1)}, which is never run; only checkpoints "
                    "of tensors, numbers, strings, lists and dictionaries load"
                ) from error
            damage = str(error).splitlines()[0]
        except (RuntimeError, EOFError, KeyError, ValueError) as error:
            damage = str(error).splitlines()[0]
    previous = path.with_name("previous.ckpt")
    advice = "no earlier one is whole"
    if path.name != previous.name and previous.exists() and damage_of(previous) is None:
        advice = f"the one before it is whole: resume from it with --ckpt_path previous ({previous})"
    raise UsageError(f"the checkpoint {path} is damaged: {damage}; {advice}")


def damage_of(path: Path) -> str | None:
    """Returns the damage of a checkpoint file that its checksums show; None: it is whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        return f"it is cut off, or not a checkpoint at all ({error})"
    return None if bad is None else f"its part {bad} does not match its checksum"


def changes(checkpoint: dict[str, Any], model: Any, datamodule: Any) -> list[str]:
    """Returns the arguments that differ from the checkpoint's, as ``clip_range: 0.2 → 0.1``."""
    lines = []
    for key, owner in (("hyper_parameters", model), ("datamodule_hyper_parameters", datamodule)):
        saved = settings_of(checkpoint, key)
        for name, value in owner.hparams.items():
            value = described(value)  # as the checkpoint has it
            if name in saved and name not in FILLED_IN and not name.startswith("_") and saved[name] != value:
                lines.append(f"{name}: {saved[name]} → {value}")
    return lines
