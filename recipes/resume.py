"""Finding the run to go on with, looking at its checkpoint before it is trusted, and saying what was changed."""

import pickle
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_modules.common.errors import UsageError

#: What ``--ckpt_path`` takes instead of a path: a checkpoint of the newest run.
NAMES = ("last", "previous", "best")
#: Arguments that a run fills in by itself.
FILLED_IN = ("observation_space", "action_space", "description")


@dataclass(frozen=True)
class Run:
    """A run's folder, and its checkpoint; None where it was stopped before the first."""

    folder: Path
    checkpoint: Path | None


def newest_run(parent: Path) -> Path | None:
    """The newest of a logger's folders ``version_0``, ``version_1``, …; None where there is none."""
    numbered = {int(match.group(1)): path for path in parent.glob("version_*")
                if (match := re.fullmatch(r"version_(\d+)", path.name)) and path.is_dir()}  # fmt: skip
    return numbered[max(numbered)] if numbered else None


def find(folder: Path, name: str) -> Path | None:
    """A run's checkpoint by its name, one of :data:`NAMES`; None where there is none.

    ``last`` is the newest from which the run can go on: one that was written for a SLURM queue counts, and where the
    last one's renaming was interrupted, ``previous`` does.
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
    """A checkpoint whose every byte was checked; its tensors stay on the disk until they are used.

    Raises:
        UsageError: damaged, or holding code; where the one before it is whole, says so.
    """
    if path.is_dir():
        raise UsageError(f"the checkpoint {path} is a folder, as sharding writes elsewhere; its index would have to be "
                         "unpickled, which could do anything: give a file that was written here")  # fmt: skip
    damage = damage_of(path)
    if damage is None:
        try:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        except pickle.UnpicklingError as error:
            code = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"(?:class|function) ([\w.]+)", str(error))
            if code is not None:
                raise UsageError(
                    f"{path} holds code, {code.group(1)}, which could do anything and is never run; only checkpoints "
                    "of tensors, numbers, strings, lists and dictionaries load"
                ) from error
            damage = str(error).splitlines()[0]
        except (RuntimeError, EOFError, KeyError, ValueError) as error:
            damage = str(error).splitlines()[0]
    previous = path.with_name("previous.ckpt")
    advice = "no earlier one is whole"
    if path.name != previous.name and previous.exists() and damage_of(previous) is None:
        advice = f"the one before it is whole: go on from there with --ckpt_path previous ({previous})"
    raise UsageError(f"the checkpoint {path} is damaged: {damage}; {advice}")


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint file, from its own checksums; None: nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        return f"it is cut off, or no checkpoint at all ({error})"
    return None if bad is None else f"its part {bad} does not match its checksum"


def changes(checkpoint: dict[str, Any], model: Any, datamodule: Any) -> list[str]:
    """Arguments that differ from the checkpoint's, as ``clip_range: 0.2 → 0.1``."""
    lines = []
    for key, owner in (("hyper_parameters", model), ("datamodule_hyper_parameters", datamodule)):
        saved = checkpoint.get(key) or {}
        for name, value in owner.hparams.items():
            if name in saved and name not in FILLED_IN and not name.startswith("_") and saved[name] != value:
                lines.append(f"{name}: {saved[name]} → {value}")
    return lines
