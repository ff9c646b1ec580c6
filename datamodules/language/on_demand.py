"""Records of a file or dataset that are read, checked and encoded when they are asked for."""

import threading
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from datamodules.language.sources import NothingUsable, notice, place_of
from datamodules.language.tasks.base import Record
from rl_modules.common.errors import UsageError

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
        for start in range(0, len(self), BLOCK):
            yield from self.take(range(start, min(start + BLOCK, len(self))))


#: Rows of a source, each with its place.
Rows = list[Placed] | ReadByNumber[Placed]


class Records(ReadByNumber[Record]):
    """The records of a file or dataset, which are read and checked when they are asked for."""

    def __init__(self, rows: Rows, numbers: Sequence[int], as_record: Callable[[str, Record], Record]) -> None:
        self._rows, self._numbers, self._as_record = rows, numbers, as_record

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Record]:
        if len(self) == len(self._rows):
            return (self._as_record(place, row) for place, row in self._rows)
        return super().__iter__()

    def take(self, numbers: Sequence[int]) -> list[Record]:
        chosen = [self._numbers[i] for i in numbers]
        found = [self._rows[i] for i in chosen] if isinstance(self._rows, list) else self._rows.take(chosen)
        return [self._as_record(place, row) for place, row in found]


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
                # The shortest record has at least the tokens that the chat template adds to each.
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
