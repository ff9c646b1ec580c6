"""Rounds of completions that are written while earlier ones train."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from rl_modules.core.state import Stateful, persistent
from rl_modules.language.sampling import Completions

#: From the place of a round's first prompt in the stream to its completions.
Write = Callable[[int], Completions]


class WrittenAhead(Stateful):
    """A queue of rounds that a thread or a request writes. A checkpoint holds them, of unwritten ones the prompts."""

    #: Of each round the place of its ``first`` prompt in the stream, and what is ``written``, None until it is.
    rounds: list[dict[str, Any]] = persistent([])

    def __init__(self, write: Write, in_thread: bool = True) -> None:
        self._write, self.in_thread = write, in_thread
        self._futures: dict[int, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def ask(self, first: int) -> None:
        """Requests a round, which is written after those before it."""
        self.rounds.append({"first": first, "written": None})
        self.start()

    def start(self) -> None:
        """Starts the writing of all rounds that have not begun, as after a resume."""
        for waiting in self.rounds:
            if waiting["written"] is None and waiting["first"] not in self._futures:
                if not self.in_thread:
                    self._fill(waiting)
                    continue
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="written ahead")
                self._futures[waiting["first"]] = self._pool.submit(self._fill, waiting)

    def _fill(self, waiting: dict[str, Any]) -> None:
        written = self._write(waiting["first"])
        waiting["written"] = {field.name: getattr(written, field.name) for field in fields(written)}

    def take(self) -> tuple[int, Completions]:
        """Waits for the first round, and takes it out of the queue: the place of its first prompt, its completions."""
        waiting = self.rounds[0]
        if (future := self._futures.get(waiting["first"])) is not None:
            future.result()
        elif waiting["written"] is None:
            self._fill(waiting)
        self.rounds.pop(0)
        self._futures.pop(waiting["first"], None)
        return waiting["first"], Completions(**waiting["written"])

    def stop(self) -> None:
        """Ends the thread after the current round, without waiting for it; the others stay in the queue."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
