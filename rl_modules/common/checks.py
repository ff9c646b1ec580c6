"""Checks of constructor arguments, and their conversion to what a checkpoint may hold."""

from typing import Any

import numpy as np

from rl_modules.common.errors import UsageError


def unit_interval(name: str, value: float, open_at_zero: bool = False) -> float:
    """``value`` as a float.

    Raises:
        UsageError: it lies outside [0, 1], or outside (0, 1] with ``open_at_zero``.
    """
    if not 0 <= value <= 1 or (value == 0 and open_at_zero):
        raise UsageError(f"{name}={value} must lie in {'(' if open_at_zero else '['}0, 1]")
    return float(value)


def at_least(name: str, value: int, least: int = 1, unit: str = "") -> int:
    """``value`` as an int.

    Raises:
        UsageError: it is smaller than ``least``.
    """
    if value < least:
        raise UsageError(f"{name}={value} must be at least {least}{f' {unit}' if unit else ''}")
    return int(value)


def plain(value: Any) -> Any:
    """A hyperparameter without NumPy in it, which ``weights_only`` loading refuses.

    NumPy scalars become Python numbers and arrays become lists, in nested dictionaries, lists and tuples too.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def make_plain(hparams: Any) -> None:
    """Convert every entry of a module's or datamodule's ``hparams`` by :func:`plain`, in place."""
    for name, value in list(hparams.items()):
        hparams[name] = plain(value)
