"""Records from a task, a JSONL file or a dataset, with one set of checks."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datamodules.language.dataset_files import TableRows, describe_dataset, is_table, read_dataset
from datamodules.language.jsonl_files import JsonlRows
from datamodules.language.notices import notice
from datamodules.language.records import TEXTS, NothingUsable, as_prompt, as_record, as_text, short
from datamodules.language.tasks import Task, make_task
from datamodules.language.tasks.base import Record
from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.seeding import stream_seed

#: Records that are read together.
_BLOCK = 1000
#: Rows of a source, each with its place.
Rows = list[tuple[str, dict[str, Any]]] | JsonlRows | TableRows


class Records(Sequence[Record]):
    """The records of a file or dataset, which are read and checked when they are asked for.

    Args:
        rows: of the source, each with its place.
        numbers: of the rows that are taken.
        as_record: makes a row a record.
    """

    def __init__(self, rows: Rows, numbers: Sequence[int], as_record: Callable[[str, Record], Record]) -> None:
        self._rows, self._numbers, self._as_record = rows, numbers, as_record

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Record]:
        if len(self) == len(self._rows):
            return (self._as_record(place, row) for place, row in self._rows)
        blocks = (range(i, min(i + _BLOCK, len(self))) for i in range(0, len(self), _BLOCK))
        return (record for block in blocks for record in self.take(block))

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self.take(numbers) if isinstance(numbers, range) else self.take([numbers])[0]

    def take(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the records of some numbers."""
        chosen = [self._numbers[i] for i in numbers]
        found = [self._rows[i] for i in chosen] if isinstance(self._rows, list) else self._rows.take(chosen)
        return [self._as_record(place, row) for place, row in found]


def load_records(
    *,
    task: str | Task | None = None,
    task_kwargs: dict[str, Any] | None = None,
    path: str | Path | None = None,
    dataset: Any = None,
    dataset_config: str | None = None,
    dataset_split: str | None = None,
    columns: dict[str, str] | None = None,
    answer_after: str | None = None,
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    required: Sequence[str] = ("prompt",),
    reshape: Callable[[Record, str], Record] | None = None,
    texts: Sequence[str] = TEXTS,
    as_read: bool = False,
) -> Sequence[Record]:
    """Records from exactly one source.

    Args:
        task: a task, its name or its import path.
        task_kwargs: the task's settings.
        path: JSONL file, one object per line, which may be gzipped; or a parquet, arrow or csv file. The cells of a csv
            file are texts.
        dataset: hub name, or a directory or file (parquet, csv, json) that ``datasets`` reads; or one of its objects.
        dataset_config: the hub dataset's configuration.
        dataset_split: the dataset's split, ``train``, or a part of it, ``train[:90%]``; None: the only one.
        columns: record's column → the source's column, or a template such as ``"{question} ->"``; None: by the same
            names. Columns that are not mentioned keep their names.
        answer_after: keep of every answer what follows this text, such as GSM8K's ``####``.
        split: of a task, ``train`` or ``test``. Files and datasets are taken whole.
        n: of a task, so many records; of a file or dataset at most so many, drawn with ``seed``; None: all.
        seed: of what is drawn.
        required: columns that every record must have; ``chosen`` and ``rejected`` beside ``prompt`` make preferences
            (where they are made by a task, they are synthesised).
        reshape: converts a row of a file or dataset, given its place for messages, to a record's columns, which are
            checked next.
        texts: columns of a file or dataset that must be text where they occur; numbers become text. Others are kept as
            they are.
        as_read: leave the records of a file or dataset where they are; each is read and checked when it is asked for.

    Returns:
        Dicts with at least the required columns. ``prompt`` is text or a list of chat messages.

    Raises:
        UsageError: no source or several; a file, line, column or value that can't be used; an empty dataset.
    """
    given = [name for name, value in (("task", task), ("path", path), ("dataset", dataset)) if value is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of task, path and dataset; got {' and '.join(given) or 'none'}")
    if task is not None:
        made = make_task(task, **({} if isinstance(task, Task) else {"seed": seed}), **(task_kwargs or {}))
        return task_records(made, split, n, required)
    if path is not None:
        where, rows = str(path), read_path(path)
    else:
        assert dataset is not None
        where = f"dataset {dataset if isinstance(dataset, str) else describe_dataset(dataset)!r}"
        rows = read_dataset(dataset, dataset_config, dataset_split)
    if not rows:
        raise UsageError(f"{where} is empty; at least one record is needed")
    numbers: Sequence[int] = range(len(rows))
    if n is not None and n < len(rows):
        numbers = sorted(random.Random(stream_seed(seed, 0, "records")).sample(numbers, n))

    def to_record(place: str, row: dict[str, Any]) -> Record:
        return as_record(row, place, columns, answer_after, required, reshape, texts)

    records = Records(rows, numbers, to_record)
    return records if as_read else list(records)


def task_records(task: Task, split: str, n: int | None, required: Sequence[str]) -> list[Record]:
    """Returns a task's records, or its preferences where ``rejected`` is required, checked as those of a file.

    Raises:
        UsageError: the task raises, has none, or one that can't be used.
    """
    what = f"task {task.name!r}"
    try:
        records = list(task.preferences(split, n) if "rejected" in required else task.records(split, n))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} raised {what_happened(error)} while it made its {split} records") from error
    if not records and n != 0:
        raise UsageError(f"{what} has no records in its {split} split")
    # A number is no answer to the default is_correct, which compares texts.
    texts = TEXTS if type(task).is_correct is Task.is_correct else TEXTS[1:]
    return [_checked(record, f"{what}, record {i}", required, texts) for i, record in enumerate(records)]


def _checked(record: Any, place: str, required: Sequence[str], texts: Sequence[str]) -> Record:
    """Returns a task's record with its texts checked."""
    if not isinstance(record, dict):
        raise UsageError(f"{place} is {short(record)}, where a dict with {', '.join(required)} should be")
    for name in required:
        if record.get(name) is None:
            raise UsageError(f"{place} has no {name!r}; it has {', '.join(map(str, record))}")
    given = {name: as_text(record[name], f"{place}: {name!r}") for name in texts if record.get(name) is not None}
    return {**record, "prompt": as_prompt(record["prompt"], place), **given}


def read_path(path: str | Path) -> Rows:
    """Returns the rows of one file, each with its place: a table that ``datasets`` reads, or else JSONL.

    Raises:
        UsageError: see :class:`JsonlRows` and :func:`read_dataset`.
    """
    if Path(path).is_file() and is_table(Path(path)):
        return read_dataset(str(path), where=str(path))
    return JsonlRows(path)


def check_prompt_lengths(lengths: Sequence[int], limit: int, where: str, overlong: str = "error") -> list[int]:
    """Selects the records whose prompts fit into the model's context.

    Args:
        lengths: tokens of every prompt.
        limit: most tokens of a prompt.
        where: the records' source, for the message.
        overlong: ``error``, or ``drop`` with one printed count.

    Returns:
        Indices of the records to keep, in order.

    Raises:
        NothingUsable: all prompts are too long under ``drop``.
        UsageError: a prompt is too long under ``error``; another value of ``overlong``.
    """
    if overlong not in ("error", "drop"):
        raise UsageError(f"overlong={overlong!r} must be error or drop")
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    dropped = len(lengths) - len(kept)
    if dropped and (overlong == "error" or not kept):
        first = next(i for i, length in enumerate(lengths) if length > limit)
        refusal = UsageError if overlong == "error" else NothingUsable
        raise refusal(f"{where}: {dropped} of {len(lengths)} prompts are longer than {limit} tokens (record {first} "
                         f"has {lengths[first]}); shorten them or take a model with more positions"
                         + ("" if overlong == "drop" else ", or set overlong=drop"))  # fmt: skip
    if dropped:
        notice(f"{where}: {dropped} of {len(lengths)} records left out, their prompts are longer than {limit} tokens")
    return kept
