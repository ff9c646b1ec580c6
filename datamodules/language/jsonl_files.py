"""Reading of JSONL files, gzipped or not, with the place of every row."""

import gzip
import json
import zlib
from collections.abc import Iterator
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
        place = f"{path}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UsageError(f"{place}: byte 0x{raw[error.start]:02x} in column {error.start + 1} is not UTF-8; "
                             f"{_other_kind(path) or 'save the file as UTF-8'}") from error  # fmt: skip
        if not line:
            continue
        if is_first and (line == "[" or line.startswith(("[{", "[ {"))):
            raise UsageError(f"{place}: a JSON array, where a JSONL file has one object per line; give the file as "
                             "dataset, which reads arrays too")  # fmt: skip
        is_first = False
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            kind = _other_kind(path)
            raise UsageError(f"{place}: not valid JSON, {error.msg} in column {error.colno}"
                             f"{kind and f'; {kind}'}") from error  # fmt: skip
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place}: JSON that can't be read ({error})") from error
        if not isinstance(row, dict):
            raise UsageError(f'{place}: a {type(row).__name__}, where an object such as {{"prompt": "…"}} should be')
        yield place, row


def _refuse_constant(text: str) -> Any:
    """Refuses NaN and Infinity, which are not JSON and would become text, or a reward that makes the loss NaN."""
    raise ValueError(f"{text}, which is no JSON and no value that a prompt, an answer or a completion can have")


def _other_kind(path: str | Path) -> str:
    """Returns a remedy for a file whose name shows that it is not JSONL; empty for others."""
    packed = ".gz" if str(path).endswith(".gz") else ""
    suffix = Path(str(path).removesuffix(".gz")).suffix
    if suffix in ("", ".json", ".jsonl", ".jsonlines", ".ndjson"):
        return ""
    return f"a file ending in {suffix + packed!r} is not read: give JSONL, which may be gzipped, csv, parquet or arrow"


def _lines(path: str | Path) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            is_gzip = file.read(2) == GZIP
            file.seek(0)
            yield from gzip.GzipFile(fileobj=file) if is_gzip else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"path={str(path)!r} can't be unpacked ({error}); the file is damaged or was not copied to "
                         "its end") from error  # fmt: skip
    except OSError as error:
        raise UsageError(f"path={str(path)!r} can't be read ({error.strerror}); give a JSONL file, or first run the "
                         "stage that writes it (the config's header says how)") from error  # fmt: skip
