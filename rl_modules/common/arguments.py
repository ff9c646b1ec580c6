"""The arguments of a module or datamodule: those that this project's constructors received, and those that a user's
subclass received. The subclass's constructor may choose arguments and change them before it passes them on.
"""

import io
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from rl_modules.common.errors import UsageError


def arguments_to_store(made: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of a module or datamodule for a checkpoint: those from which its class is constructed
    again, and the run's settings that differ from them because a user's constructor chose them.
    """
    from rl_modules.core.settings import Declared, received_otherwise, set_by_constructor

    if not isinstance(made, Declared):
        return settings, {}
    chosen, before = set_by_constructor(made), received_otherwise(made)
    parameters: Any = made
    now, then = parameters._hparams, parameters._hparams_initial
    # A setting that was assigned after construction has no such value.
    changed = {name for name in then if repr(now.get(name)) != repr(then[name])}
    received = {name: value for name, value in before.items() if name not in changed}
    stored = {name: x for name, x in settings.items() if name not in chosen}
    others = {name: plain(settings[name]) for name in {*chosen, *received} if name in settings}
    return {**stored, **received}, {name: x for name, x in others.items() if is_storable(x)}


def make_loadable(checkpoint: dict[str, Any], module: Any, datamodule: Any) -> None:
    """Makes a checkpoint loadable whatever arguments a subclass has, right before it is written."""
    parameters, chosen = arguments_to_store(module, checkpoint.get("hyper_parameters", {}))
    checkpoint["hyper_parameters"] = {name: plain(x) for name, x in parameters.items() if is_storable(x)}
    checkpoint["left_out"] = dict(module.given_objects)
    checkpoint["chosen"] = {"hyper_parameters": chosen}
    if "datamodule_hyper_parameters" in checkpoint:
        parameters, chosen = arguments_to_store(datamodule, checkpoint["datamodule_hyper_parameters"])
        checkpoint["datamodule_hyper_parameters"] = plain(described(parameters))
        checkpoint["chosen"]["datamodule_hyper_parameters"] = chosen
    for name, state in checkpoint.get("callbacks", {}).items():
        checkpoint["callbacks"][name] = _with_python_numbers(state)


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


def _with_python_numbers(state: Any) -> Any:
    if type(state) is dict:
        return {_with_python_numbers(key): _with_python_numbers(item) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_python_numbers(item) for item in state)
    return state.item() if isinstance(state, np.generic) else state


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
