"""Arguments that name a user's class or function, with its arguments."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.loading import import_user_module, member_of

#: A module class or callable: its import path, ``{"class_path": ..., "init_args": {...}}``, or in Python itself. The
#: command line's parser would call a ``Callable[..., nn.Module]`` before the spaces are known: ``Any`` stands for it.
Custom = str | dict[str, Any] | Any


def to_plain(name: str, given: Custom | None) -> str | dict[str, Any] | None:
    """Converts a class or callable to its import path with arguments, which a checkpoint may hold.

    Args:
        name: of the argument, for messages.
        given: as the user gave it; ``functools.partial`` brings arguments.

    Raises:
        UsageError: it can't be found again by a path, or is of another type.
    """
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


def networks_to_plain(hparams: Any) -> None:
    """Converts ``network`` and ``features_extractor`` of a module's ``hparams`` by :func:`to_plain`, in place.

    Raises:
        UsageError: one can't be converted, or both are given.
    """
    given = [name for name in ("network", "features_extractor") if hparams.get(name) is not None]
    for name in given:
        hparams[name] = to_plain(name, hparams[name])
    if len(given) == 2:
        raise UsageError("network and features_extractor are both given; network is the whole network, with its own "
                         "features")  # fmt: skip


def make(name: str, given: Custom, *arguments: Any) -> nn.Module:
    """Imports and calls what an argument names.

    Args:
        name: of the argument, for messages.
        given: as :func:`to_plain` returned it.
        *arguments: spaces, which come before ``init_args``.

    Raises:
        UsageError: it can't be imported, does not take the arguments, or makes no module.
    """
    described: Any = given if isinstance(given, dict) else {"class_path": given}
    path, settings = described["class_path"], described.get("init_args") or {}
    found = _imported(name, path)
    try:
        made = found(*arguments, **settings)
    except Exception as error:
        spaces_given = " and ".join(str(space) for space in arguments)
        raise UsageError(f"{name}: {path} can't be made from {spaces_given} with init_args={settings}: "
                         f"{what_happened(error)}") from error  # fmt: skip
    if not isinstance(made, nn.Module):
        raise UsageError(f"{name}: {path} made {type(made).__name__}; it must make a torch.nn.Module")
    return made


def require_class(name: str, saved: Any) -> None:
    """Refuses a function that a checkpoint names, because loading would call arbitrary code.

    Args:
        name: of the argument.
        saved: its value in the checkpoint, as :func:`to_plain` returned it; None: not given.

    Raises:
        UsageError: it names anything but a class of ``torch.nn.Module``.
    """
    if saved is None:
        return
    path = saved["class_path"] if isinstance(saved, dict) else saved
    found = _imported(name, path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UsageError(f"the checkpoint names {name}={path}, which is no class of torch.nn.Module, and a checkpoint "
                         "must not choose which functions are called; if you trust it, give it again: "
                         f"load_from_checkpoint(…, {name}={path.rpartition('.')[2]})")  # fmt: skip


def _imported(name: str, path: str) -> Callable[..., Any]:
    module, _, attribute = path.replace(":", ".").rpartition(".")
    if not module:
        raise UsageError(f"{name}={path!r} must be an import path such as my_package.MyNetwork")
    found = member_of(import_user_module(module, f"{name}={path!r}"), attribute, f"{name}={path!r}")
    if not callable(found):
        raise UsageError(f"{name}={path!r} is a {type(found).__name__}; give a module class, or a function that makes "
                         "a module")  # fmt: skip
    return found
