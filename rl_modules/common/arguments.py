"""The arguments of a module or datamodule: those that this project's constructors received, and those that a user's
subclass received. The subclass's constructor may choose arguments and change them before it passes them on.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_modules.common.errors import UsageError, naming

#: Hyperparameters that name a network by its import path; loading a checkpoint makes those that are classes.
OWN_NETWORKS = ("network", "features_extractor")
#: Types of the numbers in arrays that torch has too.
_NUMBERS = np.typecodes["AllInteger"] + "?efdFD"
#: The class that ``load_from_checkpoint`` is building, the arguments that its caller gave, and the settings of the
#: checkpoint, before these replaced them; None: unknown.
_building: ContextVar[tuple[type, frozenset[str], dict[str, Any] | None] | None] = ContextVar("building", default=None)


def chosen_by_checkpoint(made: Any) -> set[str]:
    """Names of the arguments that a checkpoint alone gave to an object, whichever of its keys held them."""
    names: list[str] = made._given.names
    cls, given, _ = _building.get() or (None, frozenset(), None)
    return set(names) - given if cls is not None and isinstance(made, cls) else set()


def plain(value: Any, into_dicts: bool = True) -> Any:
    """Converts to Python's types: numbers and arrays of NumPy and torch, paths; tensors with dimensions stay.

    Without ``into_dicts`` the contents of dictionaries stay too: they are arguments of a user's class.
    """
    if isinstance(value, np.generic | np.ndarray) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value.tolist()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()} if into_dicts else value
    if type(value) in (list, tuple):
        return type(value)(plain(item, into_dicts) for item in value)
    return str(value) if isinstance(value, PurePath) else value


def has_arrays(value: Any) -> bool:
    """Returns whether a value contains arrays of numbers, which :func:`plain` makes lists."""
    if type(value) in (dict, list, tuple):
        return any(has_arrays(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, np.ndarray) and value.dtype.char in _NUMBERS and value.dtype.isnative


# ---------------------------------------------------------------- callables


def build(argument: str, factory: Callable[[Any], Any], given: Any) -> Any:
    """Returns what a factory makes."""
    with naming(argument):
        return factory(given)


def require_callable(name: str, value: Any) -> Any:
    """Refuses what is no callable."""
    if value is not None and not callable(value):
        raise UsageError(
            f"{name}={value!r} must be a callable, such as a class of torch.optim"
            f"{'.lr_scheduler' if name == 'lr_scheduler' else ''}"
        )
    return value


#: A module class or callable: its import path, ``{"class_path": ..., "init_args": {...}}``, or in Python itself. The
#: command line's parser would call a ``Callable[..., nn.Module]`` before the spaces are known: ``Any`` stands for it.
Custom = str | dict[str, Any] | Any


def to_plain(name: str, given: Custom | None) -> str | dict[str, Any] | None:
    """Converts a class or callable to its import path with arguments, which a checkpoint may hold."""
    if given is None or isinstance(given, str):
        return given

    return plain_path(name, given)


def plain_path(name: str, given: Custom) -> dict[str, Any]:
    """A class or callable as its import path with arguments."""
    if isinstance(given, dict):
        if not isinstance(given.get("class_path"), str) or set(given) - {"class_path", "init_args"}:
            raise UsageError(f"{name}={given!r} must have the key class_path, and perhaps init_args")
        return given
    arguments: dict[str, Any] = {}
    target: Any = given
    if isinstance(given, functools.partial) and not given.args:
        target, arguments = given.func, dict(given.keywords)
    path = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    if isinstance(target, nn.Module) or not callable(target) or "<" in path or path.endswith("."):
        raise UsageError(
            f"{name}={given!r} has no import path, by which a checkpoint could find it again; give a "
            "class or function at the first level of a module, or functools.partial of one with keyword "
            "arguments"
        )
    return {"class_path": path, "init_args": arguments}
