"""Records of any source; those of a file or dataset are read, checked and encoded when they are asked for."""

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.language.files import Rows, name_of, read_dataset, read_file
from datamodules.language.formats import as_record
from datamodules.language.jsonl import BLOCK, ReadByNumber
from datamodules.language.sources import TEXTS, NothingUsable, as_prompt, as_text, short
from datamodules.language.tasks import Record, Task, make_task
from datamodules.language.tasks.base import TooFew
from rl_modules.common.errors import UsageError, require_one, what_happened
from rl_modules.common.notices import notice
from rl_modules.common.seeding import stream_seed
from rl_modules.language.text.records import place_of


class Records(ReadByNumber[Record]):
    """The records of a file or dataset, which are read and checked when they are asked for."""

    def __init__(self, rows: Rows, numbers: Sequence[int], as_record: Callable[[Record, str], Record]) -> None:
        self._rows, self._numbers, self._as_record = rows, numbers, as_record

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, numbers: Sequence[int]) -> list[Record]:
        placed = self._rows.take([self._numbers[i] for i in numbers])
        return [self._as_record(row, place) for place, row in placed]


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
    at_most: bool = False,
) -> Sequence[Record]:
    """Records from exactly one source, with at least the ``required`` columns; a task synthesises ``chosen`` and
    ``rejected``. ``prompt`` is text or a list of messages. The arguments are those of the datamodules, and:

    ``split`` is that of a task, ``train`` or ``test``; files and datasets are taken whole. Of a task ``n`` records are
    taken, or under ``at_most`` all where it has fewer; of a file or dataset at most so many, drawn with ``seed``; None:
    all. ``reshape`` converts a row of a file or dataset, given its place for messages, before its columns are checked;
    ``texts`` are those that must be text, or numbers. With ``as_read`` the records of a file or dataset stay where they
    are; each is read and checked when it is asked for.

    Raises:
        UsageError: no source or several; a file, line, column or value that can't be used; an empty dataset.
    """
    require_one({"task": task, "path": path, "dataset": dataset})
    if task is not None:
        made = make_task(task, **({} if isinstance(task, Task) else {"seed": seed}), **(task_kwargs or {}))
        return task_records(made, split, n, required, at_most)
    chosen: Sequence[int]
    if path is not None:
        rows = read_file(path)
        chosen = range(len(rows))
    else:
        rows, chosen = read_dataset(dataset, dataset_config, dataset_split)
    name = path if path is not None else dataset
    folder = Path(name).parent if isinstance(name, str | Path) and Path(name).is_file() else None
    if not chosen:
        raise UsageError(f"{path or f'dataset {name_of(dataset)!r}'} is empty; at least one record is needed")
    if n is not None and n < len(chosen):
        chosen = sorted(random.Random(stream_seed(seed, 0, "records")).sample(chosen, n))
    checks: dict[str, Any] = {"columns": columns, "answer_after": answer_after, "required": required}
    records = Records(rows, chosen, partial(as_record, **checks, reshape=reshape, texts=texts, folder=folder))
    return records if as_read else list(records)


def task_records(task: Task, split: str, n: int | None, required: Sequence[str], at_most: bool = False) -> list[Record]:
    """A task's records, or its preferences where ``rejected`` is required, checked as those of a file.

    ``at_most`` takes all where there are fewer than ``n``, which is refused otherwise.
    """
    what = f"task {task.name!r}"
    make = task.preferences if "rejected" in required else task.records
    try:
        try:
            records = list(make(split, n))
        except TooFew as few:
            if not at_most:
                raise
            records = list(make(split, few.exist))
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


class EncodedRecords(ReadByNumber[Record]):
    """Records with token ids, of which only the numbers are in memory.

    The start checks every row, and encodes the first thousand and those that may be left out: with more than ``limit``
    tokens, an empty prompt, or equal answers. So the same records are left out as where all are loaded.
    """

    def __init__(self, records: Records, encode: Callable[[list[Record]], list[Record]], limit: int, name: str) -> None:
        self._records, self._encode, self._name = records, encode, name
        # Generations that are written ahead read in a thread of their own, and a tokenizer serves one at a time.
        self._lock = threading.Lock()
        is_kept = bytearray(len(records))
        # The shortest record has at least the tokens that the chat template adds to each.
        template = limit
        block: dict[int, Record] = {}
        for number, record in enumerate(records):
            if number < BLOCK or _is_doubtful(record, limit - template):
                block[number] = record
            else:
                is_kept[number] = True
            if len(block) == BLOCK or (block and number == len(records) - 1):
                found = self._encoded(list(block.values()))
                for kept in _numbers_of(found, block):
                    is_kept[kept] = True
                template = min([template, *map(_n_tokens, found)])
                block.clear()
        self._kept = array("Q", (number for number, flag in enumerate(is_kept) if flag))
        if not self._kept:
            raise NothingUsable(f"{name}: none of its {len(records)} records can be used")
        if len(self) < len(records):
            notice(f"{name}: {len(records) - len(self)} of {len(records)} records left out")

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, numbers: Sequence[int]) -> list[Record]:
        """One that ``encode`` leaves out is replaced by another of them, or by the next."""
        n = len(self)
        with self._lock:
            for further in range(min(n, BLOCK)):
                found = self._encoded(self._records.take([self._kept[(number + further) % n] for number in numbers]))
                if found:
                    return [found[i % len(found)] for i in range(len(numbers))]
        raise NothingUsable(f"{self._name}: none of {BLOCK} records in a row can be used")

    def _encoded(self, records: list[Record]) -> list[Record]:
        try:
            return self._encode(records) if records else []
        except NothingUsable:
            return []
        except UsageError as error:
            for record in records:
                try:
                    self._encode([record])
                except NothingUsable:
                    continue
                except UsageError as own:
                    place = place_of(record, self._name)
                    raise (own if place in str(own) else UsageError(f"{place}: {own}")) from error
            raise


def _is_doubtful(record: Record, room: int) -> bool:
    """Whether columns have more than ``room`` bytes, so perhaps tokens; or no prompt, or two equal answers."""
    texts = map(str, record.values())
    size = sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
    return size > room or not str(record["prompt"]).strip() or record.get("chosen", 0) == record.get("rejected", 1)


def _n_tokens(record: Record) -> int:
    return sum(len(ids) for name, ids in record.items() if name.endswith("_ids"))


def _numbers_of(found: list[Record], block: dict[int, Record]) -> Iterator[int]:
    """Yields the numbers of the records that are left of a block. Equal ones are left, or left out, together."""
    left = iter(found)
    one = next(left, None)
    for number, record in block.items():
        if one is not None and all(one.get(name) == value for name, value in record.items()):
            yield number
            one = next(left, None)
