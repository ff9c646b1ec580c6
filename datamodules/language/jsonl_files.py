"""Reading of JSONL files, gzipped or not, with the place of every row."""

import gzip
import io
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_modules.common.errors import UsageError

#: First bytes of a gzipped file.
GZIP = b"\x1f\x8b"


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its ``file:line``. Empty lines are passed over; gzip is unpacked.

    Raises:
        UsageError: no such file, a file of another kind, a JSON array, or a line that is not UTF-8, not JSON or not an
            object.
    """
    is_first = True
    for number, raw in enumerate(_lines(path), 1):
        if _is_empty(raw, number):
            continue
        yield f"{path}:{number}", _object(raw, path, number, is_first)
        is_first = False


class JsonlRows(Sequence[tuple[str, dict[str, Any]]]):
    """The rows of :func:`read_jsonl`, read by their number: only the places where lines begin are kept in memory.

    A gzipped file can't be read from its middle, so its unpacked bytes are kept instead.

    Args:
        path: the file.

    Raises:
        UsageError: the file can't be read. A line is parsed, and refused, when it is read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with _refusing(path), Path(path).open("rb") as file:
            self._stamp = _stamp(file)
            is_gzip = file.read(2) == GZIP
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

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return read_jsonl(self._path)

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self.take(numbers) if isinstance(numbers, range) else self.take([numbers])[0]

    def take(self, numbers: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
        """Returns the rows of some numbers.

        Raises:
            UsageError: a line that is no object; the file was changed since it was opened.
        """
        with _refusing(self._path), Path(self._path).open("rb") as file:
            if _stamp(file) != self._stamp:
                raise UsageError(f"path={str(self._path)!r} was changed while it is read; start the run again")
            source = file if self._unpacked is None else io.BytesIO(self._unpacked)
            rows = []
            for i in numbers:
                source.seek(self._begins[i])
                number = self._numbers[i]
                rows.append((f"{self._path}:{number}", _object(source.readline(), self._path, number, i == 0)))
            return rows


def _stamp(file: Any) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _is_empty(raw: bytes, number: int) -> bool:
    return raw[:1] != b"{" and not raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip()


def _object(raw: bytes, path: str | Path, number: int, is_first: bool) -> dict[str, Any]:
    """Parses one line."""
    place = f"{path}:{number}"
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: byte 0x{raw[error.start]:02x} in column {error.start + 1} is not UTF-8; "
                         f"{_other_kind(path) or 'save the file as UTF-8'}") from error  # fmt: skip
    if is_first and (line == "[" or line.startswith(("[{", "[ {"))):
        raise UsageError(f"{place}: a JSON array, where a JSONL file has one object per line; give the file as "
                         "dataset, which reads arrays too")  # fmt: skip
    try:
        row = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        kind = _other_kind(path)
        raise UsageError(f"{place}: not valid JSON, {error.msg} in column {error.colno}"
                         f"{kind and f'; {kind}'}") from error  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: JSON that can't be read ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f'{place}: a {type(row).__name__}, where an object such as {{"prompt": "…"}} should be')
    return row


def _refuse_constant(text: str) -> Any:
    """Refuses NaN and Infinity, which are not JSON and would become text, or a reward that makes the loss NaN."""
    raise ValueError(f"{text}, which is no JSON and no value that a prompt, an answer or a completion can have")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _other_kind(path: str | Path) -> str:
    """Returns a remedy for a file whose name shows that it is not JSONL; empty for others."""
    packed = ".gz" if str(path).endswith(".gz") else ""
    suffix = Path(str(path).removesuffix(".gz")).suffix
    if suffix in ("", ".json", ".jsonl", ".jsonlines", ".ndjson"):
        return ""
    return f"a file ending in {suffix + packed!r} is not read: give JSONL, which may be gzipped, csv, parquet or arrow"


def _lines(path: str | Path) -> Iterator[bytes]:
    with _refusing(path), Path(path).open("rb") as file:
        is_gzip = file.read(2) == GZIP
        file.seek(0)
        yield from gzip.GzipFile(fileobj=file) if is_gzip else file


@contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    """Says in a sentence why a file can't be read."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"path={str(path)!r} can't be unpacked ({error}); the file is damaged or was not copied to "
                         "its end") from error  # fmt: skip
    except OSError as error:
        raise UsageError(f"path={str(path)!r} can't be read ({error.strerror}); give a JSONL file, or first run the "
                         "stage that writes it (the config's header says how)") from error  # fmt: skip
