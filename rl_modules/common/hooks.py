"""Lightning's hooks in a subclass come after this project's own.

In a plain LightningModule a hook does nothing, so that hardly anybody calls ``super()`` in one. Here hooks write curves
and checkpoints.
"""

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any


def is_ours(defined: Any) -> bool:
    """Whether a class or function is this project's."""
    return defined.__module__.partition(".")[0] in ("rl_modules", "datamodules")


def keep_hooks(cls: type) -> None:
    """Makes each hook of a user's class run the one that it would replace first, unless it calls it itself.

    Args:
        cls: a subclass of a module or datamodule; changed in place.
    """
    if is_ours(cls):
        return
    for name, own in list(vars(cls).items()):
        if not _is_hook(name) or not isinstance(own, FunctionType) or _names(inspect.unwrap(own).__code__, name):
            continue
        replaced = next((vars(base)[name] for base in cls.__mro__ if is_ours(base) and name in vars(base)), None)
        if replaced is not None:
            setattr(cls, name, _both(replaced, own))


def _both(first: Callable, then: Callable) -> Callable:
    @functools.wraps(then)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return then(self, *args, **kwargs)

    return hook


def _is_hook(name: str) -> bool:
    return name in ("setup", "teardown") or (name.startswith("on_") and not name.endswith("batch_transfer"))


def _names(code: CodeType, name: str) -> bool:
    """Whether a function or one within it names an attribute, as ``super().on_fit_start()`` does."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return name in code.co_names or name in code.co_consts or any(_names(part, name) for part in inner)
