"""Checkpoint files that are either whole or absent, whatever interrupts their writing."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from rl_modules.core.checkpoint_file import require_plain
from rl_modules.core.hooks import CheckedCheckpointIO


class AtomicCheckpointIO(CheckedCheckpointIO):
    """Writes to a temporary file in the same folder, forces it to the disk and renames it to the target."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        require_plain(checkpoint)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.part")
        try:
            with unfinished.open("wb") as file:
                try:
                    torch.save(checkpoint, file)
                except RuntimeError as error:
                    # torch's writer of archives raises its own error after the file's.
                    raise error.__context__ if isinstance(error.__context__, OSError) else error from None
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException:
            # The partial file must not fill the disk further.
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        sync_folder(target.parent)


def rotate(folder: Path, keep_previous: bool) -> None:
    """Renames ``next.ckpt`` to ``last.ckpt``, that to ``previous.ckpt``; a whole one of the two exists at any time."""
    last = folder / "last.ckpt"
    if keep_previous and last.exists():
        previous, link = folder / "previous.ckpt", folder / "previous.ckpt.part"
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        try:
            os.link(last, link)
            os.replace(link, previous)
        except OSError:  # a filesystem without links
            os.replace(last, previous)
    os.replace(folder / "next.ckpt", last)
    sync_folder(folder)


def keep(folder: Path, step: int) -> None:
    """Keeps ``last.ckpt`` also as ``step-<step>.ckpt``; a checkpoint of the same step is replaced."""
    kept, link = folder / f"step-{step}.ckpt", folder / "kept.ckpt.part"
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    try:
        os.link(folder / "last.ckpt", link)
    except OSError:  # a filesystem without links
        shutil.copyfile(folder / "last.ckpt", link)
    os.replace(link, kept)


def sync_folder(folder: Path) -> None:
    """Forces renamings in a folder to the disk, where the system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
