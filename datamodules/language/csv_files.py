"""CSV files, whose cells are read as texts."""

import csv
import re
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def options_of_texts(file: str | Path) -> dict[str, Any]:
    """Returns settings with which ``datasets`` reads each cell of a csv file as text.

    By default it converts a column of numbers (007 to 7 and 1.50 to 1.5), and reads an empty cell, NA or null as
    missing.

    Args:
        file: the first of the files, whose header names the columns.

    Raises:
        ValueError: see :func:`_header`.
    """
    from datasets import Features, Value

    names = _header(file)
    return {"features": Features({str(name): Value("string") for name in names}), "keep_default_na": False}


def _header(file: str | Path) -> list[str]:
    """Returns the names of a csv file's columns.

    Raises:
        ValueError: the first row has more cells than names: pandas takes the first cells for an index then, and gives
            each name its neighbour's cell. Or a row has fewer.
    """
    import pandas

    table = pandas.read_csv(file, nrows=1, dtype=str, keep_default_na=False)
    names = [str(name) for name in table.columns]
    if len(table) and not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(f"{file}: row 0 has {len(names) + table.index.nlevels} cells under the {len(names)} names of "
                         f"the header, {', '.join(names)}: cells with commas need quotes")  # fmt: skip
    if Path(file).is_file() and Path(file).suffix == ".csv":
        _require_whole_rows(Path(file), names)
    return names


def _require_whole_rows(file: Path, names: list[str]) -> None:
    """Refuses a row with fewer cells than the header: pandas reads the missing ones as empty.

    Raises:
        ValueError: names the line.
    """
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        rows = csv.reader(lines)
        for row in rows:
            if row and len(row) < len(names):
                raise ValueError(f"{file}:{rows.line_num}: {len(row)} of the {len(names)} cells that the header names, "
                                 f"{', '.join(names)}; an empty cell needs its comma")  # fmt: skip


def options_of_folder(name: str, config: str | None) -> dict[str, Any]:
    """Returns the same for a directory of csv files; an empty dictionary for other directories.

    Args:
        name: the directory.
        config: the dataset's configuration.
    """
    import datasets

    builder = datasets.load_dataset_builder(name, config)
    files = builder.config.data_files or {}
    names = [str(file) for split in files.values() for file in split]
    if builder.info.builder_name != "csv" or not names:
        return {}
    for file in names[1:]:
        _header(file)
    return options_of_texts(names[0])


def as_number(value: Any) -> Any:
    """Returns the number or truth value that a text spells, None for an empty one; any other value as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text):
        number = float(text)
        return int(number) if number.is_integer() else number
    return value if text else None
