"""Reads the files of a run's folder, which somebody may have sent: regular files of limited size, as plain data."""

import os
import re
import stat
from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import yaml

from rl_modules.common.errors import UsageError, visible

#: Largest files that are read, in bytes: settings, and curves (together, where they are several files).
SETTINGS_BYTES, CURVES_BYTES = 2**18, 2**28
#: Most values of settings, where those that an alias repeats count each time.
MOST_VALUES = 20_000
#: Most brackets within each other.
MOST_LEVELS = 200
#: Most columns of a table of curves.
MOST_COLUMNS = 2_000


class Unreadable(UsageError):
    """A file of a run's folder that can't be read. Its message is one line."""

    def __init__(self, file: Path, why: object) -> None:
        super().__init__(f"{shown(file, 300)}: {shown(why, 300)}")


def content(file: Path, limit: int = SETTINGS_BYTES) -> bytes:
    """Returns the bytes of a regular file of at most ``limit`` bytes; a pipe or a device may have no end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would wait for a writer
        with open(descriptor, "rb") as opened:
            require_regular(file, os.fstat(descriptor), limit)
            return opened.read(limit)
    except OSError as error:
        raise Unreadable(file, error.strerror or error) from error


def require_regular(file: Path, found: os.stat_result, limit: int) -> None:
    """Refuses what is no regular file, and one that is larger than a run's."""
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable(file, "no regular file, as `rl fit` writes them")
    if found.st_size > limit:
        raise Unreadable(file, f"has {found.st_size:,} bytes, where a run's has at most {limit:,}")


def mapping(file: Path) -> dict[str, Any]:
    """Returns the settings in a YAML file, with texts as keys.

    Raises:
        Unreadable: the file can't be read, is no YAML of plain values, or repeats values by aliases without end.
    """
    text = content(file)
    depth = accumulate(1 if bracket in b"[{" else -1 for bracket in re.findall(rb"[\[\]{}]", text))
    if max(depth, default=0) > MOST_LEVELS:  # the parser needs a time that grows with their square
        raise Unreadable(file, f"more than {MOST_LEVELS} levels of brackets, which no run's settings have")
    try:
        found = yaml.safe_load(text.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, AttributeError, TypeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(file, f"no YAML of plain values: {str(error) or type(error).__name__}") from error
    parts = list(islice(values_in(found), MOST_VALUES + 1))
    if len(parts) > MOST_VALUES:
        raise Unreadable(file, f"more than {MOST_VALUES:,} values, which no run's settings have")
    if any(isinstance(part, int) and part.bit_length() > 1024 for part in parts):
        raise Unreadable(file, "a number of more than 300 digits, which no run's settings have")
    if not isinstance(found, dict | None):
        raise Unreadable(file, f"a {type(found).__name__}, where settings by name should be")
    return {str(name): value for name, value in (found or {}).items()}


def values_in(value: Any) -> Iterator[Any]:
    """Yields a value and what it contains; without end for a list that contains itself."""
    pending = [value]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, dict | list | tuple | set):
            pending += [*part, *part.values()] if isinstance(part, dict) else [*part]


def group(settings: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    """Returns a group of settings."""
    found = settings.get(name)
    if not isinstance(found, dict):
        raise Unreadable(file, f"has {name}={str(found)[:60]!r}, where settings by name should be")
    return found


def require_curves(folder: Path) -> None:
    """Refuses TensorBoard's files that are no regular files, or too large together."""
    left = CURVES_BYTES
    for file in sorted(folder.glob("*tfevents*")):
        try:
            found = file.stat()
        except OSError as error:
            raise Unreadable(file, error.strerror or error) from error
        require_regular(file, found, left)
        left -= found.st_size


def folders_with(name: str, place: Path) -> Iterator[Path]:
    """Yields the folders at and below a place that hold a file of that name, without following links."""
    pending = [str(place)]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                inside = list(entries)
        except OSError:  # it may be no folder, or not be readable
            continue
        if any(entry.name == name for entry in inside):
            yield Path(folder)
        pending += [entry.path for entry in inside if entry.is_dir(follow_symlinks=False)]


def shown(value: Any, most: int = 60) -> str:
    """Returns a value that a file holds as one short line for a terminal, without control characters."""
    text = visible(str(value)).replace("\n", r"\n").replace("\t", r"\t")
    return text if len(text) <= most else f"{text[: most - 1]}…"
