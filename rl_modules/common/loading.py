"""Objects by import path, and their settings checked before they are called."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean

#: Names that an error lists.
MOST_NAMED = 16


def load_object(path: str, what: str, known: Iterable[str] = (), kind: str = "") -> Any:
    """Imports the object named by ``package.module:name`` or ``package.module.name``, a callable if its ``kind`` is
    named, as in "a function".
    """
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not attribute or attribute == "py":
        known = list(known)
        some = ", ".join([*known[:MOST_NAMED], *["…"] * (len(known) > MOST_NAMED)])
        raise UsageError(
            f"{what} {path!r} is not known{did_you_mean(path, known)}; there are {some}, or "
            "give an import path 'package.module:name'"
        )
    found = member_of(import_user_module(module, f"{what} {path!r}"), attribute, f"{what} {path!r}")
    if kind and not callable(found):
        raise UsageError(f"{what} {path!r} is a {type(found).__name__}, where {kind} should be")
    return found


def import_user_module(module: str, what: str) -> ModuleType:
    """Imports a module of the user's."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        if isinstance(error, SyntaxError) and error.filename:
            raise UsageError(f"{what}: {error.filename}:{error.lineno}: syntax error, {error.msg}") from error
        places = [
            place
            for place in traceback.extract_tb(error.__traceback__)
            if not place.filename.startswith("<frozen ") and place.filename not in (__file__, importlib.__file__)
        ]
        if places:
            where = f"{places[-1].filename}:{places[-1].lineno}"
            raise UsageError(f"{what}: {where} raised {type(error).__name__}: {said}") from error
        name = module.removesuffix(".py").strip("./").replace("/", ".")
        hint = "" if name == module else f"; a module is named as Python imports it, {name}"
        raise UsageError(f"{what}: the module {module!r} can't be imported: {said}{hint}") from error


def member_of(module: ModuleType, name: str, what: str) -> Any:
    """Returns a module's attribute."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = did_you_mean(name, vars(module))
        raise UsageError(f"{what}: the module {module.__name__!r} has no {name!r}{near}") from error


def require_settings(factory: Callable[..., Any], settings: dict[str, Any], what: str) -> None:
    """Checks that ``factory`` accepts the named settings, and that none is missing."""
    try:
        accepted = inspect.signature(factory).parameters
    except ValueError:  # some builtins have no signature
        return
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        for setting in settings:
            if setting not in accepted:
                raise UsageError(
                    f"{what} has no setting {setting!r}{did_you_mean(setting, accepted)}; it has {', '.join(accepted)}"
                )
    missing = [
        name
        for name, p in accepted.items()
        if p.default is p.empty and name not in settings and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}")


def name_of(value: Any) -> str:
    """``package.name`` of a function or class, or of an object's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
