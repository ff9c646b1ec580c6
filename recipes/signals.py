"""Ctrl-C and SIGTERM as requests: noted at once, granted where nothing is half done."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stopped(Exception):
    """Training was asked to stop and did, with everything saved.

    Args:
        signum: the signal that asked.
        checkpoint: where everything is.
    """

    def __init__(self, signum: int, checkpoint: Any) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; everything is in {checkpoint}")
        self.signum = signum
        self.checkpoint = checkpoint


class StopRequests:
    """Notes SIGINT and SIGTERM instead of letting them interrupt a step.

    A second Ctrl-C is not waited for: it interrupts as it would without this.
    """

    def __init__(self) -> None:
        #: The signal that asked to stop; 0: none.
        self.signum = 0
        self._before: dict[int, Any] = {}

    def install(self, *more: int) -> None:
        """Take over SIGINT, SIGTERM and ``more``; outside the main thread, where Python forbids it, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM, *more):
            if signum not in self._before:
                self._before[signum] = signal.signal(signum, self._note)

    @property
    def are_noted(self) -> bool:
        """Whether the signals come here."""
        return bool(self._before)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        while self._before:
            signal.signal(*self._before.popitem())

    def handler_before(self, signum: int) -> Callable[[int, FrameType | None], Any] | None:
        """Who would have handled the signal, where that is a function."""
        handler = self._before.get(signum)
        return handler if callable(handler) else None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        again = "; Ctrl-C again ends at once, without saving" if signum == signal.SIGINT else ""
        # Not print: the interrupted code may be in the middle of writing to the same buffer.
        os.write(2, f"\n{name}: saving a checkpoint after this step{again}\n".encode())
