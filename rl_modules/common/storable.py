"""Conversion to plain data that a checkpoint may hold, and that loads with ``weights_only=True``."""

import io
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

#: Types that always load.
_SCALARS = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """Converts a value to Python's types: NumPy's and torch's numbers to numbers, arrays to lists, paths to strings, in
    nested dictionaries, lists and tuples too. A tensor with dimensions stays a tensor.
    """
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


def described(value: Any) -> Any:
    """Replaces the objects in a value that a checkpoint can't hold by their names."""
    if type(value) is dict:
        return {key: described(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(described(item) for item in value)
    return value if is_storable(value) else name_of(value)


def name_of(value: Any) -> str:
    """``package.name`` of a function or class, or of an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
