"""Rows of JSON files, exactly as they are written, each with its file and line; files of any kind are opened here."""

import gzip
import io
import json
import os
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

from rl_modules.common.errors import UsageError

#: First bytes of a gzipped file.
GZIP = b"\x1f\x8b"
#: Bytes that a line, or a file that unpacks to more than ``EXPANSION`` times its size, may have.
MOST = 256 * 2**20
EXPANSION = 500
#: Rows that are read together.
BLOCK = 1000
#: A row, and its place, for messages.
Placed = tuple[str, dict[str, Any]]
Item = TypeVar("Item")


class ReadByNumber(Sequence[Item], Generic[Item]):
    """Rows or records that are read by their numbers when they are asked for."""

    @abstractmethod
    def take(self, numbers: Sequence[int]) -> list[Item]:
        """The items of some numbers; a UsageError for one that can't be used."""

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self.take(numbers) if isinstance(numbers, range) else self.take([numbers])[0]

    def __iter__(self) -> Iterator[Item]:
        return self.since(0)

    def since(self, first: int) -> Iterator[Item]:
        """Yields the items from one on."""
        for start in range(first, len(self), BLOCK):
            yield from self.take(range(start, min(start + BLOCK, len(self))))


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A regular file's bytes, unpacked where they are gzipped; says in a sentence why they can't be read."""
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f"path={str(path)!r} is no regular file; give one, or a directory as dataset")
    try:
        with Path(path).open("rb") as file:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if file.peek(2)[:2] == GZIP else file
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"path={str(path)!r} can't be read ({getattr(error, 'strerror', None) or error}); give a whole JSONL, csv, "
            "parquet or arrow file, or first run the stage that writes it (the config's header says how)"
        ) from error


def refuse_expansion(path: str | Path, size: int) -> None:
    """Refuses a file that is unpacked to ``size`` bytes, far more than its own."""
    if size > max(MOST, EXPANSION * os.stat(path).st_size):
        raise UsageError(
            f"path={str(path)!r} unpacks to more than {EXPANSION} times its size; unpack it yourself if that is meant"
        )


def _lines(path: str | Path) -> Iterator[bytes]:
    size = 0
    with opened(path) as file:
        for line in iter(lambda: file.readline(MOST), b""):
            size += len(line)
            if size > MOST:
                refuse_expansion(path, size)
            yield line


def _is_empty(raw: bytes, number: int) -> bool:
    return raw[:1] != b"{" and not raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip()


def read_jsonl(path: str | Path) -> Iterator[Placed]:
    """The objects of a JSONL file, each with its ``file:line``. Empty lines are passed over; gzip is unpacked."""
    for number, raw in enumerate(_lines(path), 1):
        if not _is_empty(raw, number):
            yield f"{path}:{number}", parsed(raw, path, number)


def read_array(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file that holds one JSON array."""
    with opened(path) as file:
        text = file.read(MOST)
    rows = parsed(text, path, 1, list)
    if any(not isinstance(row, dict) for row in rows):
        raise UsageError(f'{path}:1: an array of other things than objects such as {{"prompt": "…"}}')
    return cast("list[dict[str, Any]]", rows)


class JsonlRows(ReadByNumber[Placed]):
    """The rows of :func:`read_jsonl` by number: only where lines begin is in memory, or a gzipped file's bytes."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with opened(path) as file:
            self._state = self._state_now()
            is_gzip = isinstance(file, gzip.GzipFile)
        self._unpacked = b"".join(_lines(path)) if is_gzip else None
        self._begins, self._numbers = array("Q"), array("Q")
        begin = 0
        for number, raw in enumerate(_lines(path), 1):
            if not _is_empty(raw, number):
                self._begins.append(begin)
                self._numbers.append(number)
            begin += len(raw)

    def __len__(self) -> int:
        return len(self._begins)

    def take(self, numbers: Sequence[int]) -> list[Placed]:
        with opened(self._path) as file:
            if self._state_now() != self._state:
                raise UsageError(f"path={str(self._path)!r} was changed while it is read; start the run again")
            source = file if self._unpacked is None else io.BytesIO(self._unpacked)
            rows = []
            for i in numbers:
                source.seek(self._begins[i])
                number = self._numbers[i]
                rows.append((f"{self._path}:{number}", parsed(source.readline(), self._path, number)))
            return rows

    def _state_now(self) -> tuple[int, int]:
        found = os.stat(self._path)
        return found.st_size, found.st_mtime_ns


def parsed(raw: bytes, path: str | Path, number: int, kind: type = dict) -> Any:
    """Parses a line, or the array of a whole file."""
    try:
        row = _DECODER.decode(raw.decode("utf-8-sig" if number == 1 else "utf-8").strip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        other = "" if number > 1 else "; other files are read if they end in .csv, .parquet or .arrow"
        raise UsageError(f"{path}:{number}: not valid JSON in UTF-8, {reason}{other}") from error
    if not isinstance(row, kind):
        raise UsageError(
            f'{path}:{number}: a {type(row).__name__}, where an object such as {{"prompt": "…"}} should be'
        )
    return row


def _refuse_constant(text: str) -> Any:
    """Refuses NaN and Infinity, which are not JSON and would become text, or a reward that makes the loss NaN."""
    raise ValueError(f"{text}, which is no JSON and no value that a prompt, an answer or a completion can have")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
