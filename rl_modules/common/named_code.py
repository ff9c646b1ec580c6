"""Code that a value names, found without importing it. A file may name only what this project registers."""

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from rl_modules.common.errors import UsageError
from rl_modules.common.loading import name_of

#: Names that transformers reads as a repository of kernels.
_KERNEL = re.compile(r".*/.*", re.DOTALL)


def parts_of(value: Any) -> Iterator[Any]:
    """Yields what nested dictionaries, lists, tuples and sets contain, keys included; of other values the value."""
    pending, seen = [value], set()
    while pending:
        part = pending.pop()
        if not isinstance(part, dict | list | tuple | set | frozenset):
            yield part
        elif id(part) not in seen:  # a list may contain itself
            seen.add(id(part))
            pending += [*part, *part.values()] if isinstance(part, dict) else [*part]


def is_path(name: str) -> bool:
    """Whether a name has the form of an import path, ``module:name`` or ``module.name``."""
    return ":" in name or "." in name


def named_code(value: Any) -> Iterator[str]:
    """Yields the texts in a value that Python could import as ``module:name`` or ``module.name``, and its callables."""
    for part in parts_of(value):
        if callable(part):
            yield name_of(part)
        elif isinstance(part, str) and is_path(part) and _is_importable(re.split(r"[.:]", part, maxsplit=1)[0]):
            yield part


def named_modules(value: Any) -> Iterator[str]:
    """Yields what :func:`named_code` does, and the names of modules that nothing has imported."""
    yield from named_code(value)
    for part in parts_of(value):
        if isinstance(part, str) and part not in sys.modules and _is_importable(part):
            yield part


def named_kernels(value: Any) -> Iterator[str]:
    """Yields the names of attention kernels that transformers would load from a repository."""
    for part in parts_of(value):
        if not isinstance(part, str | None) or (part is not None and _KERNEL.fullmatch(part)):
            yield str(part)


def _is_importable(name: str) -> bool:
    """Whether there is a module of that name at the first level; finding it runs no code of it."""
    if not name.isidentifier():
        return False
    return name in sys.modules or find_spec(name) is not None


def refuse_named(what: str, name: str, found: Iterable[str], again: str) -> None:
    """Refuses code that a file names.

    Args:
        what: the file, such as ``the checkpoint``.
        name: of the argument.
        found: the names of code that this project does not register.
        again: how the user gives the argument, as the end of a sentence that begins with "if you trust it,".
    """
    if path := next(iter(found), None):
        raise UsageError(
            f"{what} names {name}={path}, which is no part of this project, and must not choose what code runs; if "
            f"you trust it, {again}"
        )
