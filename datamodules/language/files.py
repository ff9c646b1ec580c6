"""Rows of files, folders, hub datasets and objects, read by ``datasets``; those of JSON files by ``jsonl``."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from datamodules.language.jsonl import (
    MOST,
    JsonlRows,
    Placed,
    ReadByNumber,
    opened,
    read_array,
    read_jsonl,
    refuse_expansion,
)
from rl_modules.common.errors import UsageError

if TYPE_CHECKING:
    import datasets

    #: What ``datasets`` gives: a table, a stream, or splits of either by name.
    Dataset: TypeAlias = (
        datasets.Dataset | datasets.IterableDataset | datasets.DatasetDict | datasets.IterableDatasetDict
    )

#: Rows of a source, each with its place; and a source's rows from the one of a given number on.
Rows = ReadByNumber[Placed]
RowsFrom = Callable[[int], Iterator[Placed]]
#: Files that ``datasets`` reads. Parquet is known by its first bytes, too, because its names vary.
_TABLES = {".csv": "csv", ".arrow": "arrow", ".parquet": "parquet"}


class TableRows(ReadByNumber[Placed]):
    """The rows of a table that ``datasets`` maps into memory, or of a list, each with its place."""

    def __init__(self, where: str, table: Any) -> None:
        self._where, self._table = where, table

    def __len__(self) -> int:
        return len(self._table)

    def take(self, numbers: Sequence[int]) -> list[Placed]:
        if isinstance(self._table, list):
            return [(f"{self._where}, row {i}", self._table[i]) for i in numbers]
        try:
            rows = self._table.__getitems__(list(numbers))
        except UnicodeDecodeError as error:
            if len(numbers) == 1:
                raise UsageError(f"{self._where}, row {numbers[0]}: text that is not UTF-8 ({error.reason})") from error
            return [row for number in numbers for row in self.take([number])]
        return [(f"{self._where}, row {i}", as_written(row)) for i, row in zip(numbers, rows, strict=True)]


def kind_of(path: str | Path) -> str:
    """Returns ``jsonl``, ``array`` (a file of one JSON array), or the builder of ``datasets`` that reads a file."""
    with opened(path) as file:
        head = file.read(16)
    if head.startswith(b"PAR1"):
        return "parquet"
    is_array = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return _TABLES.get(Path(path).suffix, "array" if is_array else "jsonl")


def read_file(path: str | Path, where: str | None = None) -> Rows:
    """The rows of a JSONL, csv, parquet or arrow file, or of one that holds a JSON array."""
    kind = kind_of(path)
    if kind == "jsonl":
        return JsonlRows(path)
    where = where or str(path)
    table = read_array(path) if kind == "array" else next(iter(open_dataset(str(path)).values()))
    return TableRows(where, table)


def read_dataset(source: "str | Dataset", config: str | None = None, split: str | None = None) -> tuple[Rows, range]:
    """The rows of a file, directory, hub dataset or ``datasets`` object, and the numbers of those that ``split`` names.

    ``split`` is a split or a part of it, ``train[:90%]``, or None for the only one. No code of a dataset is run.
    """
    where = f"dataset {name_of(source)!r}"
    if isinstance(source, str) and Path(source).is_file():
        rows = read_file(source, where)
        return rows, _part(where, {"train": len(rows)}, split)[1]
    found = open_dataset(source, config) if isinstance(source, str) else source
    import datasets

    if isinstance(found, datasets.IterableDatasetDict):
        if split not in found:
            raise UsageError(f"split {split!r} is no whole split of {where}, whose streams can't be divided; name one")
        streamed = list(map(as_written, unformatted(found[split])))
        return TableRows(where, streamed), range(len(streamed))
    refuse_stream(found)
    if not isinstance(found, datasets.DatasetDict):
        # All rows of an object have the name that is asked for; those of a folder may be called train[:1000].
        name = (found.split or "train") if isinstance(source, str) else (split or "train")
        found = {str(name).partition("[")[0]: found}
    name, numbers = _part(where, {name: len(table) for name, table in found.items()}, split)
    return TableRows(where, unformatted(found[name])), numbers


def _part(where: str, lengths: dict[str, int], split: str | None) -> tuple[str, range]:
    """The name of a split, and its rows or those of a part of it."""
    name = next(iter(lengths)) if split is None and len(lengths) == 1 else str(split)
    if name in lengths:
        return name, range(lengths[name])
    import datasets

    try:
        [part] = datasets.ReadInstruction.from_spec(name).to_absolute(lengths)
    except ValueError as error:
        raise UsageError(f"{where}: dataset_split={split!r}: {error}; write 'train' or 'train[90%:]'") from error
    return part.splitname, range(part.from_, part.to)


def open_stream(path: str | None, dataset: Any, config: str | None, split: str) -> RowsFrom:
    """A function that reads the rows of a file or dataset from a given one on."""
    source = path or dataset
    where = path or f"dataset {name_of(dataset)!r}"
    name, bracket, _ = split.partition("[")
    if bracket:
        raise UsageError(
            f"dataset_split={split!r} names a part of a split, which can't be streamed; give {name!r}, or "
            "streaming=false"
        )
    if path is not None or (isinstance(source, str) and Path(source).is_file()):
        kind = kind_of(source)
        if kind == "jsonl":
            return lambda start: islice(read_jsonl(source), start, None)
        if kind == "array":
            return TableRows(where, read_array(source)).since
    table = open_dataset(source, config, streaming=True) if isinstance(source, str) else source
    if isinstance(table, dict):
        if name not in table and len(table) > 1:
            raise UsageError(f"dataset {where!r} has no split {name!r}; it has {', '.join(table)}")
        table = table[name] if name in table else next(iter(table.values()))
    table = unformatted(table)
    if hasattr(table, "__len__"):  # a Dataset
        return TableRows(where, table).since

    def rows(start: int) -> Iterator[Placed]:
        return ((f"{where}, row {i}", as_written(row)) for i, row in enumerate(table.skip(start), start))

    return rows


# ---------------------------------------------------------------- what datasets opens


def open_dataset(name: str, config: str | None = None, streaming: bool = False) -> Any:
    """Opens a hub name, a directory, or a csv, parquet or arrow file by ``datasets``."""
    try:
        return _opened(name, config, streaming)
    except (UsageError, ModuleNotFoundError):  # the second is a package that is not installed
        raise
    except Exception as error:  # `datasets` raises errors of many libraries
        # The cause says more than "An error occurred while generating the dataset".
        cause = error if error.__cause__ is None or not str(error.__cause__).strip() else error.__cause__
        reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
        remedy = "give what save_to_disk wrote, or JSONL, csv, parquet or arrow files"
        if not Path(name).exists():
            remedy = "without network keep it elsewhere with save_to_disk, and give that directory"
        raise UsageError(f"dataset {name!r} can't be read ({reason}); {remedy}") from error


def _opened(name: str, config: str | None, streaming: bool) -> Any:
    import datasets

    path = Path(name)
    if path.is_dir() and any((path / file).exists() for file in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(name)
    kind, options = name, dict[str, Any]()
    if path.is_file():
        kind, options = kind_of(path), {"data_files": name}
    if kind == "parquet":
        _refuse_large_values(path)
    tables = [path] if kind == "csv" else sorted(path.rglob("*.csv")) if path.is_dir() else []
    if tables:
        # As text: else 007 becomes 7, and an empty cell or NA missing.
        columns, *_ = map(_columns_of_csv, tables)
        text = datasets.Features({column: datasets.Value("string") for column in columns})
        options |= {"features": text, "keep_default_na": False}
    return datasets.load_dataset(kind, config, streaming=streaming, **options)


def _columns_of_csv(path: Path) -> list[str]:
    """The columns of a csv file; refuses one whose cells would be read under other names, or in other rows."""
    with opened(path) as file:
        lines = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        try:
            names = next(lines, [])
            for row in lines:
                if row and len(row) != len(names):
                    raise csv.Error(f"{len(row)} cells under the {len(names)} names of the header, {', '.join(names)}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path}:{lines.line_num}: {error}; cells with commas or line breaks need quotes, each quote within "
                "them is written twice, and empty cells need their comma"
            ) from error
    return names


def _refuse_large_values(path: Path) -> None:
    """Refuses a parquet file that unpacks to far more than its size, as a long text that is repeated does."""
    import pyarrow
    import pyarrow.parquet

    size = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64) if path.stat().st_size < MOST else ():
        for column in batch.columns:
            size += (column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column).nbytes
        refuse_expansion(path, size)


# ---------------------------------------------------------------- objects of datasets


def name_of(source: "str | Dataset") -> str:
    """A dataset's name, or a description of an object: its kind, rows and fingerprint, which reveals changes."""
    if isinstance(source, str):
        return source
    import datasets

    if isinstance(source, datasets.Dataset):
        return f"Dataset of {len(source)} rows, {source._fingerprint}"
    if isinstance(source, datasets.IterableDataset):
        return f"IterableDataset {source.info.dataset_name or ''}".strip()
    if isinstance(source, datasets.IterableDatasetDict | datasets.DatasetDict):
        return f"{type(source).__name__} of {', '.join(f'{name}: {name_of(part)}' for name, part in source.items())}"
    raise UsageError(
        f"dataset is a {type(source).__name__}, where a hub name, a directory, a file, or a "
        "datasets.Dataset or DatasetDict should be"
    )


def only_split(dataset: Any) -> str | None:
    """The name of the split of an object that is one; empty for a stream, and None for an object of several splits."""
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        return ""
    return str(dataset.split or "train").partition("[")[0] if isinstance(dataset, datasets.Dataset) else None


def refuse_stream(dataset: Any) -> None:
    """Refuses a stream where all rows are to be loaded: it may have no end."""
    import datasets

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UsageError("an IterableDataset is read as it goes; set streaming=true, or give a Dataset")


def unformatted(rows: Any) -> Any:
    """Returns rows whose values are Python's, not tensors, arrays or frames as ``set_format`` asks for; a function of
    ``set_transform`` stays.
    """
    form = getattr(rows, "format", None)  # which a stream has not
    if form is None:
        return rows.with_format(None)
    return rows if form["type"] == "custom" else rows.with_format(None, form["columns"], form["output_all_columns"])


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
