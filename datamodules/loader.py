"""A loader that Lightning does not prefetch from."""

from collections.abc import Callable, Iterator
from typing import Any


class LazyLoader:
    """A sized iterable that makes each batch on demand.

    Lightning prefetches one batch of an iterable without a length, which for experience means acting with the policy
    before its last update.

    Args:
        length: number of batches.
        make_batches: returns a fresh iterator over them.
    """

    def __init__(self, length: int, make_batches: Callable[[], Iterator[Any]]) -> None:
        self._length = length
        self._make_batches = make_batches
        #: Called before each batch is made, when the last batch is finished and the next has not begun.
        self.before_next: Callable[[], None] | None = None
        #: Called while a batch is made, where that takes long and a checkpoint written now resumes exactly.
        self.while_waiting: Callable[[], None] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = self._make_batches()
        while True:
            if self.before_next is not None:
                self.before_next()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
