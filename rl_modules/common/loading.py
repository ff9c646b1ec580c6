"""Objects by import path, and their settings checked before they are called."""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean


def load_object(path: str, what: str, known: Iterable[str] = ()) -> Any:
    """Imports the object named by ``package.module:name`` or ``package.module.name``.

    Args:
        path: the import path.
        what: what it should be, for the message.
        known: names that are valid without a path.

    Raises:
        UsageError: no such module or name.
    """
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not attribute:
        known = list(known)
        raise UsageError(f"{what} {path!r} is not known{did_you_mean(path, known)}; there are {', '.join(known)}, or "
                         "give an import path 'package.module:name'")  # fmt: skip
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{what} {path!r} can't be imported ({error})") from error


def require_settings(factory: Callable[..., Any], settings: dict[str, Any], what: str) -> None:
    """Checks that ``factory`` accepts the named settings, and that none is missing.

    Raises:
        UsageError: one that it does not take, or one that it needs and that is missing.
    """
    try:
        accepted = inspect.signature(factory).parameters
    except ValueError:  # some builtins have no signature
        return
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        for setting in settings:
            if setting not in accepted:
                raise UsageError(f"{what} has no setting {setting!r}{did_you_mean(setting, accepted)}; it has "
                                 f"{', '.join(accepted)}")  # fmt: skip
    missing = [name for name, p in accepted.items() if p.default is p.empty and name not in settings and p.kind not in
               (p.VAR_KEYWORD, p.VAR_POSITIONAL)]  # fmt: skip
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}")
