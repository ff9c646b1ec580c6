"""Calls of environments: in threads or in worker processes, with a limit of time, none of which ends the run."""

import contextlib
import itertools
import math
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import Any

from datamodules.language.environments import Environment, replayable
from datamodules.language.event_loop import EventLoop, RunEnded, awaits_in
from datamodules.language.messages import answer, opening
from datamodules.language.reward_arguments import TooLong, copied
from datamodules.language.tools import schema_of
from rl_modules.common.errors import what_happened

#: Threads that wait for environments at once.
_MOST_THREADS = 512


class Objects:
    """Environments by number, in the process that holds them. What they get is a copy, and so is what they return."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._made: dict[int, Any] = {}
        self._loop = EventLoop()

    def call(self, number: int, method: str, argument: Any, limit_s: float | None) -> Any:
        """``reset`` makes a new object and returns its messages and tools; ``step`` asks it; ``close`` drops it."""
        argument = copied(argument)
        with awaits_in(self._loop, limit_s):
            if method == "reset":
                self._made[number] = self._make()
                messages = self._loop.value_of(self._made[number].reset(argument), limit_s)
                tools = getattr(self._made[number], "tools", None) or ()
                return opening(messages, [tool if isinstance(tool, dict) else schema_of(tool) for tool in tools])
            if method == "close":
                environment = self._made.pop(number, None)
                with contextlib.suppress(Exception):  # the dialogue has ended
                    if callable(close := getattr(environment, "close", None)):
                        self._loop.value_of(close(), limit_s)
                return None
            return answer(self._loop.value_of(self._made[number].step(argument), limit_s))

    def stop(self) -> None:
        self._loop.close()


class Worker:
    """A process with environments; where one hangs, a new process repeats the calls of ``replayable`` ones."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._replays = replayable(make)
        self._process: Any = None
        #: Of each environment the calls so far, and those that are in the process.
        self._calls: dict[int, list[tuple[str, Any]]] = {}
        self._held: set[int] = set()

    def call(self, number: int, method: str, argument: Any, limit_s: float | None) -> Any:
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._begin()
            earlier = self._calls.setdefault(number, [])
            if number not in self._held and method == "step":
                if not self._replays:
                    raise RuntimeError("another dialogue's environment ended its worker process")
                for call in earlier:
                    self._ask(number, *call, limit_s)
            self._held.add(number)
            earlier.append((method, argument))
            if method == "close":
                del self._calls[number]
                self._held.discard(number)
            return self._ask(number, method, argument, limit_s)

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._make), daemon=True)
        self._process.start()
        self._held.clear()
        self._pipe.recv()  # its imports are not part of a call

    def _ask(self, number: int, method: str, argument: Any, limit_s: float | None) -> Any:
        try:
            self._pipe.send((number, method, argument))
            if not self._pipe.poll(limit_s):
                raise TooLong
            value, error = self._pipe.recv()
        except (TooLong, EOFError, OSError) as ended:
            self.stop()
            raise TooLong if isinstance(ended, TooLong) else RuntimeError("its worker process has ended") from ended
        if error is not None:
            raise RuntimeError(error)
        return value

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _work(pipe: Any, make: Callable[[], Environment]) -> None:
    objects = Objects(make)
    pipe.send("ready")
    while True:
        try:
            number, method, argument = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((objects.call(number, method, argument, None), None))
        except BaseException as error:
            pipe.send((None, what_happened(error)))


class EnvironmentCalls:
    """Calls environments by number in ``workers`` processes, or with 0 in threads, for at most ``limit_s`` each."""

    def __init__(self, make: Callable[[], Environment], workers: int, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._holders: list[Any] = [Worker(make) for _ in range(workers)] or [Objects(make)]
        #: Numbers of further environments.
        self.numbers = itertools.count()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = self._busy = 0
        self._lock = threading.Lock()

    def start(self, number: int, method: str, argument: Any = None) -> "Answer":
        """Begins a call in a thread."""
        holder = self._holders[number % len(self._holders)]
        answer = Answer(None if isinstance(holder, Worker) else self.limit_s)  # a worker's calls wait for each other

        def job() -> None:
            answer.began_s = time.monotonic()
            try:
                answer.future.set_result(holder.call(number, method, argument, self.limit_s))
            except (Exception, SystemExit, RunEnded) as error:
                answer.future.set_exception(error)
            except BaseException as error:  # of the environment: Ctrl-C reaches the main thread alone
                answer.future.set_exception(RuntimeError(what_happened(error)))

        with self._lock:
            self._busy += 1
            if self._busy > self._threads < _MOST_THREADS:
                self._threads += 1
                # A daemon, because Python can't stop a thread in which an environment hangs.
                threading.Thread(target=self._serve, daemon=True, name="environment").start()
        self._jobs.put(job)
        return answer

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._busy -= 1

    def stop(self) -> None:
        """Ends the worker processes and the threads that wait for a call."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = self._busy = 0
        for holder in self._holders:
            holder.stop()


class Answer:
    """What an environment's call returns, once it does."""

    def __init__(self, limit_s: float | None) -> None:
        self.future: Future[Any] = Future()
        self.limit_s = limit_s
        self.began_s: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether the call takes longer than the limit."""
        # An event loop ends a coroutine at its limit; a thread that hangs is left alone.
        return (
            self.limit_s is not None
            and self.began_s is not None
            and not self.future.done()
            and time.monotonic() > self.began_s + self.limit_s + 0.1
        )

    @property
    def is_there(self) -> bool:
        return self.future.done() or self.is_late

    def value(self) -> Any:
        """The value; raises the environment's error, or :class:`TooLong`."""
        if not self.future.done():
            raise TooLong
        return self.future.result()


def wait(answers: Sequence[Answer], seconds: float | None, for_all: bool) -> None:
    """Waits until one answer, or all, are there or late, at most some seconds."""
    ends_s = math.inf if seconds is None else time.monotonic() + seconds
    while (missing := [x for x in answers if not x.is_there]) and (for_all or len(missing) == len(answers)):
        if (left := ends_s - time.monotonic()) <= 0:
            return
        wait_for([x.future for x in missing], min(left, 0.05), ALL_COMPLETED if for_all else FIRST_COMPLETED)
