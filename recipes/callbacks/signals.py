"""Ctrl-C, SIGTERM and SIGHUP as requests to stop, which the run grants between two batches."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stopped(Exception):
    """Training was stopped by a signal after a checkpoint was written."""

    def __init__(self, signum: int, checkpoint: Any, number: int | None = None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; the run is saved in {checkpoint}")
        self.signum = signum
        self.checkpoint = checkpoint
        self.number = number
        #: Whether ``--resume`` finds the run; the folder of a user's own logger is not known in advance.
        self.is_found_again = True


def end_at_sigterm(trainer: Any) -> None:
    """Replaces Lightning's SIGTERM handler for several ranks by one that ends the process and the ranks it started.

    Lightning's handler calls a collective on the signalled rank only, so the run hangs. While a run trains and writes
    checkpoints, :class:`StopRequests` handles the signal instead. SLURM jobs that Lightning requeues are unchanged.
    """
    from recipes.callbacks.slurm import requeue_signals  # imports Lightning, which `rl --help` does without

    def end(signum: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)  # the ranks that this process started
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    if trainer.world_size > 1 and not requeue_signals(trainer):
        trainer._signal_connector._sigterm_notifier_fn = end


class StopRequests:
    """Remembers SIGINT, SIGTERM and SIGHUP instead of letting them interrupt an optimizer step.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        #: The signal that was received; 0: none.
        self.signum = 0
        self._previous: dict[int, Any] = {}

    def install(self, *more: int) -> None:
        """Handles SIGINT, SIGTERM, ``more``, and SIGHUP unless it is ignored, as under ``nohup``. Does nothing outside
        the main thread, where Python forbids it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.signum = 0
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
            more = (hangup, *more)
        for signum in (signal.SIGINT, signal.SIGTERM, *more):
            if signum not in self._previous:
                self._previous[signum] = signal.signal(signum, self._remember)

    @property
    def is_installed(self) -> bool:
        """Whether this object handles the signals."""
        return bool(self._previous)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def previous_handler(self, signum: int) -> Callable[[int, FrameType | None], Any] | None:
        """Returns the handler that the signal had before ``install``; None where it was not a function."""
        handler = self._previous.get(signum)
        return handler if callable(handler) else None

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        again = "; a second Ctrl-C stops at once, without saving" if signum == signal.SIGINT else ""
        # os.write, not print: the interrupted code may be writing to print's buffer.
        for descriptor in (1, 2) if name == "SIGHUP" else (2,):
            try:
                os.write(descriptor, f"\n{name}: saving a checkpoint after this step{again}\n".encode())
            except OSError:  # the terminal is gone, and a later print would end the run before it has saved
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
