"""The arguments of a module or datamodule: those that this project's constructors received, and those that a user's
subclass received. The subclass's constructor may choose arguments and change them before it passes them on.
"""

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from rl_modules.common.errors import UsageError

#: Hyperparameters that name a network by its import path; loading a checkpoint makes those that are classes.
OWN_NETWORKS = ("network", "features_extractor")


def settings_of(checkpoint: dict[str, Any], key: str = "hyper_parameters") -> dict[str, Any]:
    """Returns the hyperparameters of a checkpoint's run, those among them that a subclass's constructor chose."""
    chosen = checkpoint.get("chosen", {})
    parts = [checkpoint.get(key) or {}, chosen.get(key, {}) if isinstance(chosen, dict) else chosen]
    for part in parts:
        if not isinstance(part, dict):
            raise UsageError(f"the checkpoint is damaged: it has {str(part)[:60]!r} where {key} should be; give one "
                             "that `rl fit` or Trainer.save_checkpoint wrote")  # fmt: skip
        for name in part:
            # Lightning imports what `_instantiator` and `_class_path` name.
            if not isinstance(name, str) or name.startswith("_"):
                raise UsageError(f"the checkpoint has {name!r} in {key}, which no module or datamodule takes as an "
                                 "argument; give one that `rl fit` or Trainer.save_checkpoint wrote")  # fmt: skip
    return {**parts[0], **parts[1]}


#: The class that ``load_from_checkpoint`` is building, the arguments that its caller gave, and the settings of the
#: checkpoint, before these replaced them; None: unknown.
_building: ContextVar[tuple[type, frozenset[str], dict[str, Any] | None] | None] = ContextVar("building", default=None)


@contextmanager
def building(cls: type, given: Collection[str], settings: dict[str, Any] | None = None) -> Iterator[None]:
    """Marks the arguments of objects of a class that are constructed within the context as those of a checkpoint."""
    token = _building.set((cls, frozenset(given), settings))
    try:
        yield
    finally:
        _building.reset(token)


def chosen_by_checkpoint(made: Any) -> set[str]:
    """Names of the arguments that a checkpoint alone gave to an object, whichever of its keys held them."""
    names: list[str] = made._given.names
    cls, given, _ = _building.get() or (None, frozenset(), None)
    return set(names) - given if cls is not None and isinstance(made, cls) else set()


def settings_before(made: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a checkpoint's run, also where ``load_from_checkpoint`` was given others."""
    cls, _, settings = _building.get() or (None, frozenset(), None)
    return settings_of(checkpoint) if cls is None or settings is None or not isinstance(made, cls) else settings


#: Types that always load.
_SCALARS = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """Converts to Python's types: numbers and arrays of NumPy and torch, paths; tensors with dimensions stay."""
    if isinstance(value, np.generic | np.ndarray) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value.tolist()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return str(value) if isinstance(value, PurePath) else value


def is_storable(value: Any) -> bool:
    """Returns whether a value loads again from a checkpoint without running code; what :func:`plain` converts does."""
    if type(value) in _SCALARS or isinstance(value, np.generic | np.ndarray | torch.Tensor | PurePath):
        return True
    if type(value) is dict:
        return all(is_storable(key) and is_storable(item) for key, item in value.items())
    if type(value) in (list, tuple, set):
        return all(is_storable(item) for item in value)
    if callable(value):
        return False
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # whatever the object's own pickling raises
        return False
    return True


def name_of(value: Any) -> str:
    """``package.name`` of a function or class, or of an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# ---------------------------------------------------------------- callables


def build(argument: str, factory: Callable[[Any], Any], given: Any) -> Any:
    """Returns what a factory makes."""
    try:
        return factory(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{argument} can't be made with its arguments: {type(error).__name__}: {error}") from error


def require_callable(name: str, value: Any) -> Any:
    """Refuses what is no callable."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r} must be a callable, such as a class of torch.optim"
                         f"{'.lr_scheduler' if name == 'lr_scheduler' else ''}")  # fmt: skip
    return value


#: A module class or callable: its import path, ``{"class_path": ..., "init_args": {...}}``, or in Python itself. The
#: command line's parser would call a ``Callable[..., nn.Module]`` before the spaces are known: ``Any`` stands for it.
Custom = str | dict[str, Any] | Any


def to_plain(name: str, given: Custom | None) -> str | dict[str, Any] | None:
    """Converts a class or callable to its import path with arguments, which a checkpoint may hold."""
    if given is None or isinstance(given, str):
        return given
    from rl_modules.networks.custom import plain_path  # only users bring one

    return plain_path(name, given)
