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
    """Makes each hook of a user's class, or of a mixin of its own, run the one that it would replace first, unless it
    calls that itself.

    Args:
        cls: a subclass of a module or datamodule; changed in place.
    """
    if is_ours(cls):
        return
    for name in {name: None for base in cls.__mro__ if not is_ours(base) for name in vars(base) if _is_hook(name)}:
        owner = next((base for base in cls.__mro__ if is_ours(base) and name in vars(base)), None)
        if owner is None:
            continue
        before = [vars(base)[name] for base in cls.__mro__[: cls.__mro__.index(owner)] if name in vars(base)]
        if before and _is_last_call(before, name):
            setattr(cls, name, _both(vars(owner)[name], before[0]))


def _is_last_call(hooks: list[Any], name: str) -> bool:
    """Whether a chain of hooks, in which each may call the next by ``super()``, ends before this project's.

    Args:
        hooks: in the order of the classes.
        name: of all of them.
    """
    for hook in hooks:
        if not isinstance(hook, FunctionType) or hasattr(hook, "runs_ours"):
            return False
        if not _names(inspect.unwrap(hook).__code__, name):
            return True
    return False


def _both(first: Callable, then: Callable) -> Callable:
    @functools.wraps(then)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return then(self, *args, **kwargs)

    hook.runs_ours = True  # type: ignore[attr-defined]
    return hook


def _is_hook(name: str) -> bool:
    return name in ("setup", "teardown") or (name.startswith("on_") and not name.endswith("batch_transfer"))


def _names(code: CodeType, name: str) -> bool:
    """Whether a function or one within it names an attribute, as ``super().on_fit_start()`` does."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return name in code.co_names or name in code.co_consts or any(_names(part, name) for part in inner)
