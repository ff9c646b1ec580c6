"""Callables that make optimizers and schedulers; a checkpoint holds only their names, because it holds no code."""

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from rl_modules.common.arguments import name_of
from rl_modules.common.errors import UsageError

#: Arguments of a module, and the attributes that hold them.
_ATTRIBUTES = {"optimizer": "optimizer_factory", "lr_scheduler": "scheduler_factory"}


def build(argument: str, factory: Callable[[Any], Any], given: Any) -> Any:
    """Returns what a factory makes."""
    try:
        return factory(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{argument} can't be made with its arguments: {type(error).__name__}: {error}") from error


def factory_names(module: Any) -> dict[str, str]:
    """Returns the names of a module's factories by argument."""
    made_by = {name: getattr(module, attribute, None) for name, attribute in _ATTRIBUTES.items()}
    # A partial is named by its class.
    return {
        name: name_of(getattr(factory, "func", factory)) for name, factory in made_by.items() if factory is not None
    }


def missing_factories(module: Any, checkpoint: dict[str, Any]) -> dict[str, str]:
    """Returns the names of the factories that the checkpoint's module had and this one lacks."""
    here = factory_names(module)
    return {name: given for name, given in checkpoint.get("factories", {}).items() if name not in here}


def warn_of_missing(module: Any, missing: dict[str, str]) -> None:
    """Warns at the start of a fit of the checkpoint's factories that the module lacks."""
    if missing:
        given = " and ".join(f"{name}={value}" for name, value in missing.items())
        again = ", ".join(f"{name}=…" for name in missing)
        rank_zero_warn(f"the checkpoint of {type(module).__name__} was trained with {given}, code that no checkpoint "
                       f"can hold, and this fit has the default instead; to train as before, give it again: "
                       f"load_from_checkpoint(…, {again})")  # fmt: skip


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
        raise UsageError(f"{name}={given!r} has no import path, by which a checkpoint could find it again; give a "
                         "class or function at the first level of a module, or functools.partial of one with keyword "
                         "arguments")  # fmt: skip
    return {"class_path": path, "init_args": arguments}
