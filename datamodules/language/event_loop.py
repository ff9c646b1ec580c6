"""The event loop of a run's coroutines, and functions with a limit of time in threads of their own."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

from datamodules.language.reward_arguments import TooLong

#: Of the module, because a datamodule that holds a lock can't be pickled.
_OPENING = threading.Lock()
_Serving = concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]


class RunEnded(BaseException):
    """The event loop was closed; no error of the user's function, which is therefore not called again."""


class EventLoop:
    """An event loop in a thread of its own, which all coroutines share: a session that one opens works in the next."""

    def __init__(self) -> None:
        self._opened: tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread] | None = None

    def start(self, call: Callable[[], Awaitable[Any]], limit_s: float | None) -> Callable[[], Any]:
        """Starts a coroutine; returns a function that waits for its value, or raises its error or :class:`TooLong`."""
        with _OPENING:
            if self._opened is None or not self._opened[2].is_alive():
                serving = _Serving()
                thread = threading.Thread(target=lambda: asyncio.run(_serve(serving)), daemon=True, name="coroutines")
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


async def _outcome(call: Callable[[], Awaitable[Any]], limit_s: float | None) -> tuple[Any, BaseException | None]:
    """Returns the value and None, or None and what would end the loop if it were raised."""
    task = asyncio.ensure_future(_guarded(call))
    await asyncio.wait({task}, timeout=limit_s)
    if not task.done():
        task.cancel()
        raise TooLong
    return task.result()


async def _guarded(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    try:
        return await call(), None
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as ended:
        return None, ended


# ---------------------------------------------------------------- the loop of whoever calls

#: The loop and the limit of time of the run that calls a user's function in this thread.
_OWN: ContextVar[tuple[EventLoop, float | None]] = ContextVar("loop of the run")
#: For calls outside of a run, as of a script or a test.
_SHARED = EventLoop()


@contextlib.contextmanager
def awaits_in(loop: EventLoop, limit_s: float | None) -> Iterator[None]:
    """Within it :func:`awaited` takes a run's loop, and its limit of time."""
    token = _OWN.set((loop, limit_s))
    try:
        yield
    finally:
        _OWN.reset(token)


def own_loop() -> EventLoop:
    """The loop of the run that calls, or the one of all scripts: clients that a coroutine opens work in the next."""
    return _OWN.get((_SHARED, None))[0]


def awaited(result: Any) -> Any:
    """A function's result; of an ``async`` one, once it is there."""
    loop, limit_s = _OWN.get((_SHARED, None))
    if inspect.iscoroutine(result) and _in_coroutine():
        result.close()
        raise RuntimeError("an async function can't be waited for inside a coroutine; call it from a plain function")
    return loop.value_of(result, limit_s)


def _in_coroutine() -> bool:
    """Whether this thread runs an event loop, which would wait for itself."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------- threads


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
