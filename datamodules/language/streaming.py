"""Records that are read as they are needed, from sources that need not fit into memory."""

import threading
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from datamodules.language.files import RowsFrom
from datamodules.language.jsonl import Placed
from datamodules.language.sources import NothingUsable
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.common.seeding import stream_seed
from rl_modules.language.text.records import Record

#: Optimizer steps of an epoch of a stream, whose length is not known.
STREAM_STEPS = 1000


class RecordStream:
    """The records of a source, pass after pass, shuffled in blocks of n = ``buffer_size`` rows.

    Block b holds rows b·n to (b+1)·n of the endless stream, in an order of the seed and b alone, so that a resumed run
    opens the source at its block. It has n · ``per_row`` positions; fewer records stand at several of them.
    """

    def __init__(
        self,
        rows: RowsFrom,
        encode: Callable[[list[Placed]], list[Record]],
        buffer_size: int,
        seed: int,
        name: str,
        per_row: int = 1,
    ) -> None:
        self._rows, self._encode, self._size, self._seed, self._name = rows, encode, buffer_size, seed, name
        self._per_row = per_row
        self._blocks: dict[int, list[Record]] = {}
        # Rounds that are written ahead read in a thread of their own.
        self._lock = threading.Lock()
        self._reader: Iterator[Placed] | None = None
        self._read = 0  # rows of the endless stream that the reader is past
        #: Rows of the source; None until its end was seen.
        self.length: int | None = None
        self._unusable = 0  # blocks passed over

    def __len__(self) -> int:
        """Records of a pass over the source as far as it is known, at least 1."""
        return max(1, self._read if self.length is None else self.length) * self._per_row

    def __getitem__(self, position: int) -> Record:
        """Returns the record at a position of the endless stream."""
        number, offset = divmod(position, self._size * self._per_row)
        block = self._block(number)
        return block[offset % len(block)]

    def first(self, n: int) -> list[Record]:
        """Up to ``n`` records of the first block."""
        return self._block(0)[:n]

    def _block(self, number: int) -> list[Record]:
        with self._lock:
            if number not in self._blocks:
                usable, records = self._first_usable(number)
                before = {k: block for k, block in self._blocks.items() if k == number - 1}
                self._blocks = before | dict.fromkeys(range(number, usable + 1), records)
            return self._blocks[number]

    def _first_usable(self, number: int) -> tuple[int, list[Record]]:
        """The first block from a number on that has records which can be used: its number, and they in their order."""
        usable = number
        while True:
            try:
                records = self._encode(list(islice(self._from(usable * self._size), self._size)))
                reason = "encode leaves all of them out"
            except NothingUsable as error:
                records, reason = [], str(error).removeprefix(f"{self._name}: ")
            if records:
                generator = torch.Generator().manual_seed(stream_seed(self._seed, 0, "order", usable))
                return usable, [records[i] for i in torch.randperm(len(records), generator=generator).tolist()]
            if self.length is not None and (usable + 1 - number) * self._size >= self.length:
                raise UsageError(f"{self._name}: none of its {self.length} records can be used ({reason})")
            # At the first, tenth, hundredth … unusable block, because an endless source may have no usable one.
            self._unusable += 1
            if str(self._unusable).strip("0") == "1":
                what = f"{self._unusable} blocks" if self._unusable > 1 else f"block {usable}"
                notice(
                    f"{self._name}: {what}, of streaming_buffer={self._size} records each, passed over: none can be "
                    f"used ({reason})"
                )
            usable += 1

    def _from(self, row: int) -> Iterator[Placed]:
        """The endless stream from a row on."""
        if self._reader is None or row != self._read:
            self._read, self._reader = row, self._endless(row)
        for found in self._reader:
            self._read += 1
            yield found

    def _endless(self, row: int) -> Iterator[Placed]:
        start = row if self.length is None else row % self.length
        while True:
            count = start
            for found in self._rows(start):
                count += 1
                yield found
            if count == start and start:
                # The source ended before this row: count its rows, and begin at the row modulo that number.
                self.length = sum(1 for _ in self._rows(0))
            elif count:
                self.length = count
            if not self.length:
                raise UsageError(f"{self._name} is empty; at least one record is needed")
            start = row % self.length if count == start and start else 0
