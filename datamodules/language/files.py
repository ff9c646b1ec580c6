"""Reading of files and datasets, each row with its place: JSONL here, parquet, arrow, csv and json by ``datasets``."""

import csv
import gzip
import io
import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datamodules.language.notices import notice
from datamodules.language.on_demand import Placed, ReadByNumber
from rl_modules.common.errors import UsageError

#: First bytes of a gzipped file.
GZIP = b"\x1f\x8b"
_SLICE = re.compile(r"([^\[\]]+?)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")
Row = dict[str, Any]


# ---------------------------------------------------------------- JSONL


def read_jsonl(path: str | Path) -> Iterator[Placed]:
    """The objects of a JSONL file, each with its ``file:line``. Empty lines are passed over; gzip is unpacked."""
    is_first = True
    for number, raw in enumerate(_lines(path), 1):
        if _is_empty(raw, number):
            continue
        yield f"{path}:{number}", _object(raw, path, number, is_first)
        is_first = False


class JsonlRows(ReadByNumber[Placed]):
    """The rows of :func:`read_jsonl` by number: only where lines begin is in memory, or a gzipped file's bytes."""

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

    def __iter__(self) -> Iterator[Placed]:
        return read_jsonl(self._path)

    def take(self, numbers: Sequence[int]) -> list[Placed]:
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
        raise UsageError(
            f"{place}: byte 0x{raw[error.start]:02x} in column {error.start + 1} is not UTF-8; "
            f"{_other_kind(path) or 'save the file as UTF-8'}"
        ) from error
    if is_first and (line == "[" or line.startswith(("[{", "[ {"))):
        raise UsageError(
            f"{place}: a JSON array, where a JSONL file has one object per line; give the file as "
            "dataset, which reads arrays too"
        )
    try:
        row = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        kind = _other_kind(path)
        raise UsageError(
            f"{place}: not valid JSON, {error.msg} in column {error.colno}{kind and f'; {kind}'}"
        ) from error
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
    """A remedy for a file whose name shows that it is not JSONL; empty for others."""
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
        raise UsageError(
            f"path={str(path)!r} can't be unpacked ({error}); the file is damaged or was not copied to its end"
        ) from error
    except OSError as error:
        raise UsageError(
            f"path={str(path)!r} can't be read ({error.strerror}); give a JSONL file, or first run the "
            "stage that writes it (the config's header says how)"
        ) from error


# ---------------------------------------------------------------- csv


def options_of_texts(file: str | Path) -> dict[str, Any]:
    """Settings with which ``datasets`` reads csv cells as text: else 007 becomes 7, and an empty cell or NA missing."""
    from datasets import Features, Value

    names = _header(file)
    return {"features": Features({str(name): Value("string") for name in names}), "keep_default_na": False}


def _header(file: str | Path) -> list[str]:
    """The names of a csv file's columns; a ValueError where cells would be read under other names, or as empty."""
    import pandas

    table = pandas.read_csv(file, nrows=1, dtype=str, keep_default_na=False)
    names = [str(name) for name in table.columns]
    if len(table) and not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(
            f"{file}: row 0 has {len(names) + table.index.nlevels} cells under the {len(names)} names of "
            f"the header, {', '.join(names)}: cells with commas need quotes"
        )
    if Path(file).is_file() and Path(file).suffix == ".csv":
        with Path(file).open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            rows = csv.reader(lines)
            for row in rows:
                if row and len(row) < len(names):
                    raise ValueError(
                        f"{file}:{rows.line_num}: {len(row)} of the {len(names)} cells that the header "
                        f"names, {', '.join(names)}; an empty cell needs its comma"
                    )
    return names


def options_of_folder(name: str, config: str | None) -> dict[str, Any]:
    """The same for a directory of csv files; nothing for other directories."""
    import datasets

    builder = datasets.load_dataset_builder(name, config)
    files = builder.config.data_files or {}
    names = [str(file) for split in files.values() for file in split]
    if builder.info.builder_name != "csv" or not names:
        return {}
    for file in names[1:]:
        _header(file)
    return options_of_texts(names[0])


# ---------------------------------------------------------------- datasets


def is_table(path: Path) -> bool:
    """Whether a file is parquet (by its first bytes: names vary), arrow or csv."""
    if path.suffix in (".csv", ".arrow", ".parquet"):
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def describe_dataset(dataset: Any) -> str:
    """A name for a dataset that was given as an object: its kind, rows and fingerprint, which reveals changes."""
    import datasets

    if isinstance(dataset, datasets.Dataset):
        return f"Dataset of {len(dataset)} rows, {dataset._fingerprint}"
    if isinstance(dataset, datasets.IterableDataset):
        return f"IterableDataset {dataset.info.dataset_name or ''}".strip()
    if isinstance(dataset, datasets.IterableDatasetDict):
        return f"IterableDatasetDict of {', '.join(dataset)}"
    if isinstance(dataset, datasets.DatasetDict):
        return f"DatasetDict of {', '.join(f'{name}: {describe_dataset(part)}' for name, part in dataset.items())}"
    raise UsageError(
        f"dataset is a {type(dataset).__name__}, where a hub name, a directory, a file, or a "
        "datasets.Dataset or DatasetDict should be"
    )


def read_dataset(
    name: Any, config: str | None = None, split: str | None = None, where: str | None = None
) -> "list[Placed] | TableRows":
    """The rows of a hub name, directory, file or ``datasets`` object, each with its place; no code of it is run.

    ``split`` is a split or a part of it, ``train[:90%]``, or None for the only one.
    """
    import datasets

    base, start, stop = parse_split(split)
    found = open_dataset(name, config) if isinstance(name, str) else name
    if isinstance(found, datasets.IterableDatasetDict):
        if base not in found or start is not None or stop is not None:
            raise UsageError(
                f"split {split!r} is no whole split of dataset, an {describe_dataset(found)}, whose "
                "streams can't be divided; name one of them"
            )
        streamed = f"dataset {describe_dataset(found)!r}"
        return [(f"{streamed}, row {i}", as_written(row)) for i, row in enumerate(unformatted(found[base]))]
    refuse_stream(found)
    if not isinstance(name, str):
        name = describe_dataset(name)
        base = base if isinstance(found, datasets.DatasetDict) else None
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {split_name(found): found}
    if base is None and len(splits) > 1:
        raise UsageError(f"dataset {name!r} has several splits; set dataset_split to one of {', '.join(splits)}")
    if base is not None and base not in splits:
        raise UsageError(
            f"dataset {name!r} has no split {base!r}; it has {', '.join(splits)}, and a part of one is "
            "written 'train[90%:]'"
        )
    rows = unformatted(splits[base] if base is not None else next(iter(splits.values())))
    part = range(len(rows))[_position(start, len(rows)) : _position(stop, len(rows))]
    return TableRows(where or f"dataset {name!r}", rows.select(part)) if part else []


class TableRows(ReadByNumber[Placed]):
    """The rows of a table in files that ``datasets`` maps into memory, each with its place."""

    def __init__(self, where: str, table: Any) -> None:
        self._where, self._table = where, table

    def __len__(self) -> int:
        return len(self._table)

    def take(self, numbers: Sequence[int]) -> list[Placed]:
        try:
            columns = self._table[numbers if isinstance(numbers, range) else list(numbers)]
        except UnicodeDecodeError as error:
            if len(numbers) == 1:
                raise UsageError(f"{self._where}, row {numbers[0]}: text that is not UTF-8 ({error.reason})") from error
            return [row for number in numbers for row in self.take([number])]
        rows = zip(*columns.values(), strict=True)
        return [
            (f"{self._where}, row {i}", as_written(dict(zip(columns, row, strict=True))))
            for i, row in zip(numbers, rows, strict=True)
        ]


def unformatted(rows: Any) -> Any:
    """Returns rows whose values are Python's, not tensors, arrays or frames as ``set_format`` asks for; a function of
    ``set_transform`` stays.
    """
    form = getattr(rows, "format", None)  # which a stream has not
    if form is None:
        return rows.with_format(None)
    return rows if form["type"] == "custom" else rows.with_format(None, form["columns"], form["output_all_columns"])


def refuse_stream(dataset: Any) -> None:
    """Refuses a stream where all rows are to be loaded: it may have no end."""
    import datasets

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UsageError("an IterableDataset is read as it goes; set streaming=true, or give a Dataset")


def as_written(row: dict[str, Any]) -> dict[str, Any]:
    """Removes the null keys that a table adds: it gives every message, tool and variable the keys of all others."""

    def is_of_the_template(name: str, value: Any) -> bool:
        is_list = isinstance(value, list) and bool(value)
        return name in ("tools", "chat_template_kwargs") or (
            is_list and all(isinstance(x, dict) and "role" in x for x in value)
        )

    return {key: _without_nulls(value) if is_of_the_template(key, value) else value for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def open_dataset(name: str, config: str | None, streaming: bool = False) -> Any:
    """Opens a hub name, a directory of ``save_to_disk``, or a file by ``datasets``."""
    try:
        return _opened(name, config, streaming)
    except Exception as error:  # `datasets` raises errors of many libraries
        # The cause says more than "An error occurred while generating the dataset".
        cause = error if error.__cause__ is None or not str(error.__cause__).strip() else error.__cause__
        reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
        what, remedy = "read", "give what save_to_disk wrote, or parquet, csv or json files"
        if not Path(name).exists():
            what = "loaded"
            remedy = (
                "without network download it elsewhere, keep it with save_to_disk, and give that directory "
                "instead of the hub name"
            )
        raise UsageError(f"dataset {name!r} can't be {what} ({reason}); {remedy}") from error


def _opened(name: str, config: str | None, streaming: bool) -> Any:
    import datasets

    path = Path(name)
    if path.is_dir() and any((path / file).exists() for file in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(name)
    if path.is_file():
        kinds = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
        kind = kinds.get(path.suffix) or ("parquet" if is_table(path) else None)
        if kind is None and path.suffix == ".gz" and path.with_suffix("").suffix in (".json", ".jsonl"):
            kind = "json"
        if kind is None:
            raise ValueError(f"a file ending in {path.suffix!r}, not in one of {', '.join(kinds)}")
        options = options_of_texts(name) if kind == "csv" else {}
        return datasets.load_dataset(kind, data_files=name, streaming=streaming, **options)
    options = options_of_folder(name, config) if path.is_dir() else {}
    return datasets.load_dataset(name, config, streaming=streaming, **options)


def parse_split(split: str | None) -> tuple[str | None, str | None, str | None]:
    """A split's name, and the beginning and end of the part of it, where one is named."""
    if split is None:
        return None, None, None
    match = _SLICE.fullmatch(split)
    if match is None:
        raise UsageError(f"dataset_split={split!r} is not understood; write 'train', 'train[:1000]' or 'train[90%:]'")
    return match[1], match[2], match[3]


def split_name(dataset: Any) -> str:
    """The name of a dataset's split; of one that was loaded as a part of it, ``train[:1000]``, without the brackets."""
    return str(dataset.split or "train").partition("[")[0]


def _position(text: str | None, length: int) -> int | None:
    if text is None:
        return None
    return round(length * int(text[:-1]) / 100) if text.endswith("%") else int(text)


def require_held_out(data: Any, fits: bool) -> None:
    """Refuses to evaluate a run on its training rows, unless ``eval_path`` asks for it; then prints a message."""
    if isinstance(data.eval_path, dict):
        return
    if data.eval_path is not None:
        if fits and data.path is not None and Path(data.eval_path).resolve() == Path(data.path).resolve():
            notice(
                f"eval_path={data.eval_path} is the file of path: evaluations read what the run trains on, and "
                "the best checkpoint is the one that knows it best"
            )
        return
    if data.path is not None:
        raise UsageError("evaluation needs eval_path, a JSONL file of held-out records; or set eval_steps=0")
    dataset = data.dataset
    if isinstance(dataset, str | None):
        return
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        raise UsageError(
            "evaluation beside an IterableDataset needs eval_path, a file of held-out records, or an "
            "IterableDatasetDict with the split of eval_split; or set eval_steps=0"
        )
    if not isinstance(dataset, datasets.Dataset) or not fits:
        return
    name = split_name(dataset)
    if parse_split(data.held_out_split)[0] != name:
        raise UsageError(
            f"eval_split={data.held_out_split!r} is no part of dataset, a Dataset of {name!r} rows that "
            f"are all trained on; give a DatasetDict or eval_path, or divide it by dataset_split="
            f"'{name}[:90%]' and eval_split='{name}[90%:]', or set eval_steps=0"
        )
