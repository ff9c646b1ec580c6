"""Reads checkpoint files, and refuses truncated files, those of other programs, and files that are no checkpoints."""

import pickle
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.saving import CHECKPOINT_PAST_HPARAMS_KEYS
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod

from rl_modules.common.arguments import settings_of
from rl_modules.common.calls import refuse_foreign_call
from rl_modules.common.errors import UsageError
from rl_modules.common.launched import ReturnsFromRanks

#: What Lightning needs of a checkpoint to build a module from it.
PARTS = ("state_dict", "hyper_parameters", "pytorch-lightning_version")

#: The class that ``load_from_checkpoint`` is building, the arguments that its caller gave, and the settings of the
#: checkpoint, before these replaced them; None: unknown.
_building: ContextVar[tuple[type, frozenset[str], dict[str, Any] | None] | None] = ContextVar("building", default=None)


@contextmanager
def building(cls: type, given: Collection[str], settings: dict[str, Any] | None = None) -> Iterator[None]:
    """Marks the arguments of objects of a class that are constructed within the context as those of a checkpoint.

    Args:
        cls: of the module or datamodule.
        given: names of the arguments that the caller gave again.
        settings: of the checkpoint's run; Lightning writes the given arguments over them.
    """
    token = _building.set((cls, frozenset(given), settings))
    try:
        yield
    finally:
        _building.reset(token)


def chosen_by_checkpoint(made: Any) -> set[str]:
    """Names of the arguments that a checkpoint alone gave to a module or datamodule, whichever of its keys held them.

    Args:
        made: the object, in its constructor.
    """
    names: list[str] = made.given_names
    cls, given, _ = _building.get() or (None, frozenset(), None)
    return set(names) - given if cls is not None and isinstance(made, cls) else set()


def settings_before(made: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a checkpoint's run, also where the caller of ``load_from_checkpoint`` gave others.

    Args:
        made: the module that is being loaded.
        checkpoint: as ``on_load_checkpoint`` gets it.
    """
    cls, _, settings = _building.get() or (None, frozenset(), None)
    return settings_of(checkpoint) if cls is None or settings is None or not isinstance(made, cls) else settings


def require_parts(checkpoint: Any, path: Any, what: str, parts: Collection[str] = PARTS) -> None:
    """Refuses a file that torch has read but that is not a checkpoint, such as a bare state dict.

    Args:
        checkpoint: the file's content.
        path: of the file.
        what: the argument that named it.
        parts: keys that it must have.

    Raises:
        UsageError: names what it lacks.
    """
    missing = [part for part in parts if not isinstance(checkpoint, dict) or checkpoint.get(part) in (None, {})]
    if missing:
        raise UsageError(f"{what}={str(path)!r} is no checkpoint of this project: it has no {', '.join(missing)}; give "
                         "one that `rl fit` or Trainer.save_checkpoint wrote, such as PPO's")  # fmt: skip


def read_checkpoint(path: Any, what: str = "checkpoint_path") -> dict[str, Any]:
    """Loads a checkpoint without running code; its tensors stay on the disk until they are used.

    Args:
        path: of the file.
        what: the argument that named it.

    Raises:
        UsageError: no file, a folder, a cut or foreign file, or one that holds code.
    """
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"{what}={str(path)!r} is a folder; give the .ckpt file in it")
    if not file.is_file():
        raise UsageError(f"{what}={str(path)!r} is not a file, so it can't be read; give the path of a .ckpt file")
    if not zipfile.is_zipfile(file):
        raise UsageError(f"{what}={str(path)!r} is cut off or damaged, or no checkpoint at all; give a .ckpt file that "
                         "`rl fit` or Trainer.save_checkpoint wrote")  # fmt: skip
    try:
        checkpoint = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        raise UsageError(f"{what}={str(path)!r} holds code, which is never run; only checkpoints of tensors, numbers, "
                         "strings, lists and dictionaries load") from error  # fmt: skip
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise UsageError(f"{what}={str(path)!r} is damaged: {str(error).splitlines()[0]}") from error
    require_parts(checkpoint, path, what)
    for key in CHECKPOINT_PAST_HPARAMS_KEYS:
        # Lightning would also read arguments from there, past the checks of `hyper_parameters`.
        if key in checkpoint:
            raise UsageError(f"{what}={str(path)!r} has the key {key!r}, which only checkpoints of Lightning before "
                             "0.8 have, and none of this project; give one that `rl fit` or Trainer.save_checkpoint "
                             "wrote")  # fmt: skip
    return checkpoint


class LoadsCheckpoints(ReturnsFromRanks):
    """Base of modules: ``load_from_checkpoint`` checks the file first, and never runs code in it."""

    # As in Lightning: a call on a module would leave that module unchanged.
    @_restricted_classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, weights_only: bool | None = True, **kwargs: Any
    ) -> Any:
        """Builds the module of a checkpoint, see ``lightning.LightningModule.load_from_checkpoint``.

        Args:
            checkpoint_path: the file.
            *args: ``map_location``, ``hparams_file`` and ``strict`` as Lightning takes them.
            weights_only: load without running code; on by default.
            **kwargs: hyperparameters that differ from the checkpoint's.

        Raises:
            TypeError: called on a module instead of its class.
            UsageError: an unknown hyperparameter, a file that is no checkpoint of this class, one that names a function
                for its network, or weights of another network.
        """
        taken = ("map_location", "hparams_file", "strict")
        refuse_foreign_call(cls, (), {name: value for name, value in kwargs.items() if name not in taken})
        if checkpoint_path is None:
            raise UsageError("checkpoint_path=None is no file; give the path of a .ckpt file")
        settings = None
        if isinstance(checkpoint_path, str | Path) and "://" not in str(checkpoint_path):
            saved = read_checkpoint(checkpoint_path)
            settings = settings_of(saved)
            algorithm = saved.get("algorithm")
            if algorithm != cls.__name__:
                raise UsageError(f"the checkpoint {checkpoint_path} holds {algorithm or 'no algorithm of this project'}"
                                 f", not {cls.__name__}; load it with that class")  # fmt: skip
            for name, given in saved.get("left_out", {}).items():
                if name not in kwargs:
                    raise UsageError(f"{cls.__name__} was trained with {name}={given}, an object that no checkpoint "
                                     f"can hold; give it again: load_from_checkpoint(…, {name}=…)")  # fmt: skip
        try:
            with building(cls, kwargs, settings):
                return super().load_from_checkpoint(checkpoint_path, *args, weights_only=weights_only, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            detail = " ".join(str(error).split())[:300]
            raise UsageError(f"checkpoint_path={str(checkpoint_path)!r} holds weights of another network than its "
                             f"hyperparameters describe: {detail}") from error  # fmt: skip


def widen(module: Any, state_dict: dict[str, Any]) -> None:
    """Converts tensors to 64 bits if the checkpoint's have 64 bits, because copies into 32 bits would be rounded.

    A Trainer of another precision than 64-true computes in its own, and nothing changes.

    Args:
        module: a LightningModule about to load the weights.
        state_dict: the checkpoint's weights by their names.
    """
    trainer = module._trainer
    if trainer is not None and trainer.precision != "64-true":
        return
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        saved = state_dict.get(name)
        if saved is not None and saved.dtype == torch.float64 and tensor.is_floating_point():
            tensor.data = tensor.data.double()
