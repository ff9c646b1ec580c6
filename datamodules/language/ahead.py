"""Rounds of completions that are written while earlier ones train."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from rl_modules.language.sampling import Completions

#: From the place of a round's first prompt in the stream to its completions.
Write = Callable[[int], Completions]


@dataclass
class _Round:
    """Prompts that were taken from the stream, and their completions once they are written."""

    first: int
    written: Completions | None = None
    future: "Future[Completions] | None" = None

    def result(self, write: Write) -> Completions:
        if self.written is None:
            self.written = self.future.result() if self.future is not None else write(self.first)
        return self.written


class WrittenAhead:
    """A queue of rounds, which one thread writes in turn, or which are written on request.

    A checkpoint holds the completions of the rounds that are finished, and the prompts of those that are not, which
    are written again: no prompt is left out or used twice.

    Args:
        write: writes a round.
        in_thread: call it in a thread; False: at once, in the caller's.
    """

    def __init__(self, write: Write, in_thread: bool = True) -> None:
        self._write = write
        self.in_thread = in_thread
        self._rounds: deque[_Round] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._rounds)

    def ask(self, first: int) -> None:
        """Requests a round, which is written after those before it.

        Args:
            first: place of its first prompt in the stream.
        """
        self._rounds.append(_Round(first))
        self.start()

    def start(self) -> None:
        """Starts the writing of all rounds that have not begun, as after a resume."""
        for waiting in self._rounds:
            if waiting.written is None and waiting.future is None:
                if not self.in_thread:
                    waiting.written = self._write(waiting.first)
                    continue
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="written ahead")
                waiting.future = self._pool.submit(self._write, waiting.first)

    def take(self) -> tuple[int, Completions]:
        """Waits for the first round, and takes it out of the queue.

        Returns:
            The place of its first prompt in the stream, and its completions.
        """
        found = self._rounds[0].result(self._write)
        return self._rounds.popleft().first, found

    def stop(self) -> None:
        """Ends the thread after the current round, without waiting for it; the others stay in the queue."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    def clear(self) -> None:
        """Forgets all rounds."""
        self.stop()
        self._rounds.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the rounds as plain data."""
        state = []
        for found in self._rounds:
            written = found.written or _finished(found.future)
            tensors = None if written is None else {f.name: _cpu(getattr(written, f.name)) for f in fields(written)}
            state.append({"first": found.first, "written": tensors})
        return state

    def load_state_dict(self, state: list[dict[str, Any]], device: Any) -> None:
        """The inverse of :meth:`state_dict`; :meth:`start` has the unfinished rounds written."""
        self.clear()
        for saved in state:
            tensors = saved["written"]
            written = None
            if tensors is not None:
                moved: dict[str, Any] = {k: None if v is None else v.to(device) for k, v in tensors.items()}
                written = Completions(**moved)
            self._rounds.append(_Round(saved["first"], written))


def _finished(future: "Future[Completions] | None") -> Completions | None:
    """Returns the completions of a round's thread; None if it has not finished, or has failed."""
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def _cpu(x: Any) -> Any:
    return None if x is None else x.cpu()
