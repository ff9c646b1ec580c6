"""Reward functions outside of the main thread: coroutines, parts of a batch in threads, time limits, early calls."""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from torch import Tensor

from datamodules.language.reward_arguments import Call, TooLong
from datamodules.language.reward_calls import RewardFunctions

#: Of the module, because a datamodule that holds a lock can't be pickled.
_OPENING = threading.Lock()
_Serving = concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]


class RunEnded(BaseException):
    """The event loop was closed; no error of the reward function, which is therefore not called again."""


class EventLoop:
    """An event loop in a thread of its own, which all coroutines share: a session that one opens works in the next."""

    def __init__(self) -> None:
        self._opened: tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread] | None = None

    def start(self, call: Callable[[], Awaitable[Any]], limit_s: float | None) -> Callable[[], Any]:
        """Starts a coroutine; returns a function that waits for its value, or raises its error or :class:`TooLong`."""
        with _OPENING:
            if self._opened is None or not self._opened[2].is_alive():
                serving = _Serving()
                thread = threading.Thread(
                    target=lambda: asyncio.run(_serve(serving)), daemon=True, name="reward coroutines"
                )
                thread.start()
                self._opened = (*serving.result(), thread)
            opened = self._opened
            started = asyncio.run_coroutine_threadsafe(_outcome(call, limit_s), opened[0])

        def wait() -> Any:
            try:
                value, ended = started.result(None if limit_s is None else limit_s + 1)
            except concurrent.futures.CancelledError:
                if self._opened is opened:  # the coroutine's own error
                    raise
                raise RunEnded from None
            except concurrent.futures.TimeoutError:
                if started.done():  # the coroutine's own error
                    raise
                if self._opened is opened:  # a coroutine that never awaits blocks the loop; the next one gets another
                    self._opened = None
                raise TooLong from None
            if ended is not None:
                raise ended
            return value

        return wait

    def value_of(self, result: Any, limit_s: float | None) -> Any:
        """A call's result; of a coroutine once it is there."""
        return self.start(lambda: result, limit_s)() if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Cancels what still runs, and closes the loop; another coroutine opens a new one."""
        with _OPENING:
            opened, self._opened = self._opened, None
        if opened is not None and opened[2].is_alive():
            loop, stop, thread = opened
            loop.call_soon_threadsafe(stop.set)
            thread.join(5.0)  # a coroutine that ignores its cancellation does not keep the run from ending


async def _serve(serving: _Serving) -> None:
    stop = asyncio.Event()
    serving.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()


async def _outcome(call: Callable[[], Awaitable[Any]], limit_s: float | None) -> tuple[Any, SystemExit | None]:
    """Returns the value and None, or None and the ``SystemExit``, which would end the loop if it were raised."""
    task = asyncio.ensure_future(_guarded(call))
    await asyncio.wait({task}, timeout=limit_s)
    if not task.done():
        task.cancel()
        raise TooLong
    return task.result()


async def _guarded(call: Callable[[], Awaitable[Any]]) -> tuple[Any, SystemExit | None]:
    try:
        return await call(), None
    except SystemExit as ended:
        return None, ended


# ---------------------------------------------------------------- threads


def score_in_parts(
    rewards: RewardFunctions,
    records: Sequence[dict[str, Any]],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None,
) -> list[Call]:
    """Calls each function on as many parts of a batch as there are workers, of whole prompts and similar sizes."""
    n = len(records)
    begins = [i for i in range(1, n) if records[i]["prompt"] != records[i - 1]["prompt"]]
    cuts = [0]
    for k in range(1, rewards.workers):
        later = [i for i in begins if i > cuts[-1]]
        if later:
            cuts.append(min(later, key=lambda i: abs(i - k * n / rewards.workers)))

    def score(function: int, first: int, stop: int) -> list[Call]:
        here = slice(first, stop)
        ids = None if completion_ids is None else completion_ids[here]
        return rewards.score(first, records[here], completions[here], ids, rewards.trainer_state, [function])

    with ThreadPoolExecutor(rewards.workers, thread_name_prefix="reward") as pool:
        calls = [
            pool.submit(score, function, *part) for function in range(len(rewards)) for part in pairwise([*cuts, n])
        ]
        return [call for found in calls for call in found.result()]


def in_time(func: Callable[..., Any], arguments: dict[str, Any], loop: EventLoop, limit_s: float) -> Any:
    """What a function returns, within the time limit."""
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(loop.value_of(func(**arguments), limit_s))
        except BaseException as error:
            outcome.set_exception(error)

    # Python can't stop a thread; as a daemon it does not keep the process from ending with the error.
    threading.Thread(target=work, daemon=True, name="reward function").start()
    try:
        return outcome.result(limit_s)
    except concurrent.futures.TimeoutError:
        if outcome.done():  # the function's own error
            raise
        raise TooLong from None


class EarlyRewards:
    """Calls reward functions from threads on each prompt's completions as soon as all of them have ended."""

    def __init__(
        self, rewards: RewardFunctions, tokenizer: Any, records: Sequence[dict[str, Any]], num_generations: int
    ) -> None:
        self.rewards, self.tokenizer = rewards, tokenizer
        #: Passed to every call, including calls that run during later training.
        self.trainer_state = rewards.trainer_state
        self.records, self.num_generations = records, num_generations
        self._ids: dict[int, dict[int, list[int]]] = {}
        self._pool = ThreadPoolExecutor(rewards.workers, thread_name_prefix="reward")
        self._parts: list[Future[list[Call]]] = []

    def on_ended(self, row: int, tokens: list[int], finished: bool = True) -> None:
        """Notes a completion; the last one of its prompt starts the calls."""
        group = row // self.num_generations
        ended = self._ids.setdefault(group, {})
        ended[row] = tokens
        if len(ended) == self.num_generations:
            ids = [tokens for _, tokens in sorted(self._ids.pop(group).items())]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            records = [self.records[group]] * self.num_generations
            first = group * self.num_generations
            call = self.rewards.score
            self._parts.append(self._pool.submit(call, first, records, texts, ids, self.trainer_state))

    def result(self, records: Sequence[dict[str, Any]], texts: Sequence[str]) -> Tensor:
        """Waits for all calls; returns what :class:`RewardFunctions` returns for the whole batch."""
        try:
            calls = [call for part in self._parts for call in part.result()]
        finally:
            self._pool.shutdown(cancel_futures=True)
        return self.rewards.joined(calls, records, texts)

    def stop(self) -> None:
        """Ends the calls that have not begun, without waiting for the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)
