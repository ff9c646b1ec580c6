"""Arguments as a checkpoint holds them, and objects that are built from these."""

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from rl_modules.common.arguments import _building
from rl_modules.common.errors import UsageError

#: Types that always load.
_SCALARS = (type(None), bool, int, float, str, bytes)


def settings_of(checkpoint: dict[str, Any], key: str = "hyper_parameters") -> dict[str, Any]:
    """Returns the hyperparameters of a checkpoint's run, those among them that a subclass's constructor chose."""
    chosen = checkpoint.get("chosen", {})
    parts = [checkpoint.get(key) or {}, chosen.get(key, {}) if isinstance(chosen, dict) else chosen]
    for part in parts:
        if not isinstance(part, dict):
            raise UsageError(
                f"the checkpoint is damaged: it has {str(part)[:60]!r} where {key} should be; give one "
                "that `rl fit` or Trainer.save_checkpoint wrote"
            )
        for name in part:
            # Lightning imports what `_instantiator` and `_class_path` name.
            if not isinstance(name, str) or name.startswith("_"):
                raise UsageError(
                    f"the checkpoint has {name!r} in {key}, which no module or datamodule takes as an "
                    "argument; give one that `rl fit` or Trainer.save_checkpoint wrote"
                )
    return {**parts[0], **parts[1]}


@contextmanager
def building(cls: type, given: Collection[str], settings: dict[str, Any] | None = None) -> Iterator[None]:
    """Marks the arguments of objects of a class that are constructed within the context as those of a checkpoint."""
    token = _building.set((cls, frozenset(given), settings))
    try:
        yield
    finally:
        _building.reset(token)


def settings_before(made: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a checkpoint's run, also where ``load_from_checkpoint`` was given others."""
    cls, _, settings = _building.get() or (None, frozenset(), None)
    return settings_of(checkpoint) if cls is None or settings is None or not isinstance(made, cls) else settings


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
