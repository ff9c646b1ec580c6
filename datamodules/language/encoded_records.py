"""Training records of a large source, which are turned into tokens when they are asked for."""

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datamodules.language.notices import notice
from datamodules.language.records import NothingUsable, place_of
from datamodules.language.sources import Records
from datamodules.language.tasks.base import Record
from rl_modules.common.errors import UsageError

#: Records that are encoded together at the start.
_BLOCK = 1000


class EncodedRecords(Sequence[Record]):
    """Records with token ids, of which only the numbers are in memory.

    The start reads and checks every row once. It encodes the first thousand, and each that may be left out or refused:
    one that may have more than ``limit`` tokens, an empty prompt, or two equal answers. So the same records are left
    out, and stand in the same order, as where all are loaded. What only the tokenizer or the chat template finds in
    another record is an error, with its place, when it is first read.

    Args:
        records: of the source.
        encode: adds the token ids to records; may leave some out.
        limit: most tokens of a record.
        name: of the source, for messages.

    Raises:
        UsageError: a row or record that can't be used.
        NothingUsable: all records are left out.
    """

    def __init__(self, records: Records, encode: Callable[[list[Record]], list[Record]], limit: int, name: str) -> None:
        self._records, self._encode, self._name = records, encode, name
        # Generations that are written ahead read in a thread of their own, and a tokenizer serves one at a time.
        self._lock = threading.Lock()
        is_kept = bytearray(len(records))
        template = limit
        block: dict[int, Record] = {}
        for number, record in enumerate(records):
            if number < _BLOCK or _is_doubtful(record, limit - template):
                block[number] = record
            else:
                is_kept[number] = True
            if len(block) == _BLOCK or (block and number == len(records) - 1):
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

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self.take(numbers) if isinstance(numbers, range) else self.take([numbers])[0]

    def take(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the records of some numbers. One that ``encode`` leaves out is replaced by another of them, or by the
        next.

        Raises:
            UsageError: a record that can't be used.
        """
        n = len(self)
        with self._lock:
            for further in range(min(n, _BLOCK)):
                found = self._encoded(self._records.take([self._kept[(number + further) % n] for number in numbers]))
                if found:
                    return [found[i % len(found)] for i in range(len(numbers))]
        raise NothingUsable(f"{self._name}: none of {_BLOCK} records in a row can be used")

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
    """Returns whether the columns have more than ``room`` bytes, and so perhaps tokens; or the prompt is empty, or two
    answers are equal.
    """
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
