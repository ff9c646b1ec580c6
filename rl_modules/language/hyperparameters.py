"""Hyperparameters as plain data, which a checkpoint may hold under ``weights_only=True``."""

from pathlib import PurePath
from typing import Any

import numpy as np
import torch


def make_plain(module: Any) -> None:
    """Convert a module's or datamodule's hyperparameters in place, right after ``save_hyperparameters``.

    Args:
        module: with ``hparams``. What was passed as a NumPy number, an array, a tensor or a path is then a Python
            number, list or string.
    """
    for parameters in (module._hparams, module._hparams_initial):
        for name, value in parameters.items():
            parameters[name] = plain(value)


def plain(value: Any) -> Any:
    """The same value in Python's own types, as far as it has them; dictionaries and lists are gone through."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    return str(value) if isinstance(value, PurePath) else value
