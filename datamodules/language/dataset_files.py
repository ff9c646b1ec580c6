"""Reading of data by the library ``datasets``: hub datasets, saved ones, and parquet, arrow, csv and json files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datamodules.language.csv_files import options_of_folder, options_of_texts
from rl_modules.common.errors import UsageError

#: Rows of a table that are read together.
_BLOCK = 1000
_SLICE = re.compile(r"([^\[\]]+?)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


def is_table(path: Path) -> bool:
    """Returns whether a file is parquet (by its first bytes: names vary), arrow or csv."""
    if path.suffix in (".csv", ".arrow", ".parquet"):
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def describe_dataset(dataset: Any) -> str:
    """Returns a name for a dataset that was given as an object: its kind, rows and fingerprint, which reveals changes.

    Args:
        dataset: a ``datasets.Dataset`` or ``DatasetDict``, or their iterable kinds, which are streamed.

    Raises:
        UsageError: another object.
    """
    import datasets

    if isinstance(dataset, datasets.Dataset):
        return f"Dataset of {len(dataset)} rows, {dataset._fingerprint}"
    if isinstance(dataset, datasets.IterableDataset):
        return f"IterableDataset {dataset.info.dataset_name or ''}".strip()
    if isinstance(dataset, datasets.IterableDatasetDict):
        return f"IterableDatasetDict of {', '.join(dataset)}"
    if isinstance(dataset, datasets.DatasetDict):
        return f"DatasetDict of {', '.join(f'{name}: {describe_dataset(part)}' for name, part in dataset.items())}"
    raise UsageError(f"dataset is a {type(dataset).__name__}, where a hub name, a directory, a file, or a "
                     "datasets.Dataset or DatasetDict should be")  # fmt: skip


def read_dataset(
    name: Any, config: str | None = None, split: str | None = None, where: str | None = None
) -> "list[tuple[str, dict[str, Any]]] | TableRows":
    """Returns the rows of a dataset, each with its place, read by ``datasets`` when they are asked for; no code of the
    dataset is run.

    Args:
        name: hub name; a directory that ``save_to_disk`` wrote; a directory or file of parquet, csv or json; a
            ``datasets.Dataset``, which is taken whole where no such split is asked of it, or a ``DatasetDict``.
        config: the hub dataset's configuration.
        split: a split or a part of it, ``train[:90%]``; None: the only one. Of an ``IterableDatasetDict`` a whole
            split, which is read to its end.
        where: begins the rows' places; None: the dataset's name.

    Raises:
        UsageError: it can't be loaded, has no such split, or holds text that is not UTF-8.
    """
    import datasets

    base, start, stop = parse_split(split)
    try:
        found = open_dataset(name, config) if isinstance(name, str) else name
    except Exception as error:  # `datasets` raises errors of many libraries
        raise UsageError(unreadable(name, error)) from error
    if isinstance(found, datasets.IterableDatasetDict):
        if base not in found or start is not None or stop is not None:
            raise UsageError(f"split {split!r} is no whole split of dataset, an {describe_dataset(found)}, whose "
                             "streams can't be divided; name one of them")  # fmt: skip
        streamed = f"dataset {describe_dataset(found)!r}"
        return [(f"{streamed}, row {i}", as_written(row)) for i, row in enumerate(found[base])]
    refuse_stream(found)
    if not isinstance(name, str):
        name = describe_dataset(name)
        base = base if isinstance(found, datasets.DatasetDict) else None
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {split_name(found): found}
    if base is None and len(splits) > 1:
        raise UsageError(f"dataset {name!r} has several splits; set dataset_split to one of {', '.join(splits)}")
    if base is not None and base not in splits:
        raise UsageError(f"dataset {name!r} has no split {base!r}; it has {', '.join(splits)}, and a part of one is "
                         "written 'train[90%:]'")  # fmt: skip
    rows = splits[base] if base is not None else next(iter(splits.values()))
    part = range(len(rows))[_position(start, len(rows)) : _position(stop, len(rows))]
    return TableRows(where or f"dataset {name!r}", rows.select(part)) if part else []


class TableRows(Sequence[tuple[str, dict[str, Any]]]):
    """The rows of a table in files that ``datasets`` maps into memory, each with its place.

    Args:
        where: begins the places.
        table: a ``datasets.Dataset``.
    """

    def __init__(self, where: str, table: Any) -> None:
        self._where, self._table = where, table

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for start in range(0, len(self), _BLOCK):
            yield from self.take(range(start, min(start + _BLOCK, len(self))))

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self.take(numbers) if isinstance(numbers, range) else self.take([numbers])[0]

    def take(self, numbers: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
        """Returns the rows of some numbers.

        Raises:
            UsageError: text that is not UTF-8.
        """
        try:
            columns = self._table[numbers if isinstance(numbers, range) else list(numbers)]
        except UnicodeDecodeError as error:
            if len(numbers) == 1:
                raise UsageError(f"{self._where}, row {numbers[0]}: text that is not UTF-8 ({error.reason})") from error
            return [row for number in numbers for row in self.take([number])]
        rows = zip(*columns.values(), strict=True)
        return [(f"{self._where}, row {i}", as_written(dict(zip(columns, row, strict=True))))
                for i, row in zip(numbers, rows, strict=True)]  # fmt: skip


def refuse_stream(dataset: Any) -> None:
    """Refuses a stream where all rows are to be loaded.

    Raises:
        UsageError: it may have no end.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UsageError("an IterableDataset is read as it goes; set streaming=true, or give a Dataset")


def as_written(row: dict[str, Any]) -> dict[str, Any]:
    """Removes the null keys that a table adds: it gives every message, tool and variable the keys of all others."""
    return {key: _without_nulls(value) if _is_of_the_template(key, value) else value for key, value in row.items()}


def _is_of_the_template(name: str, value: Any) -> bool:
    """Returns whether the chat template reads a column: messages, tools or variables."""
    if name in ("tools", "chat_template_kwargs"):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) and "role" in x for x in value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def open_dataset(name: str, config: str | None, streaming: bool = False) -> Any:
    """Opens a hub name, a directory of ``save_to_disk``, or a file by ``datasets``.

    Args:
        name: of the dataset.
        config: the hub dataset's configuration.
        streaming: read rows as they are needed.
    """
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


def unreadable(name: str, error: Exception) -> str:
    """Returns a sentence that says why a dataset can't be read."""
    # The cause says more than "An error occurred while generating the dataset".
    cause = error if error.__cause__ is None or not str(error.__cause__).strip() else error.__cause__
    reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
    if Path(name).exists():
        return f"dataset {name!r} can't be read ({reason}); give what save_to_disk wrote, or parquet, csv or json files"
    return (f"dataset {name!r} can't be loaded ({reason}); without network download it elsewhere, keep it with "
            "save_to_disk, and give that directory instead of the hub name")  # fmt: skip


def parse_split(split: str | None) -> tuple[str | None, str | None, str | None]:
    """Returns a split's name, and the beginning and end of the part of it, where one is named."""
    if split is None:
        return None, None, None
    match = _SLICE.fullmatch(split)
    if match is None:
        raise UsageError(f"dataset_split={split!r} is not understood; write 'train', 'train[:1000]' or 'train[90%:]'")
    return match[1], match[2], match[3]


def split_name(dataset: Any) -> str:
    """The name of a dataset's split; of one that was loaded as a part of it, ``train[:1000]``, without the brackets.

    Args:
        dataset: a ``datasets.Dataset``.
    """
    return str(dataset.split or "train").partition("[")[0]


def _position(text: str | None, length: int) -> int | None:
    if text is None:
        return None
    return round(length * int(text[:-1]) / 100) if text.endswith("%") else int(text)
