"""Progress of a run without a terminal, as lines in its log."""

import sys
import time
from typing import Any

from recipes.callbacks.progress import TransitionProgressBar


class ProgressLines:
    """Prints a line every half minute where there is no terminal: in the log of SLURM or ``nohup``.

    It is not a callback, because Lightning calls each callback about ten times per batch. ``Checkpoints`` calls it
    between two batches.
    """

    def __init__(self, bar: TransitionProgressBar, every_s: float = 30.0) -> None:
        self.bar = bar
        self.every_s = every_s
        self._began_s = self._due_s = 0.0
        self._done_before = 0

    def start(self, trainer: Any) -> None:
        """Begins to count the time of one run."""
        self.bar.start(trainer)
        self._began_s = time.monotonic()
        self._due_s = self._began_s + self.every_s
        self._done_before = self.bar.counts(trainer)[0]

    def tick(self, trainer: Any, now_s: float) -> None:
        """Prints a line if one is due."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + self.every_s
        done, total = self.bar.counts(trainer)
        speed, result = self.bar.notes(trainer)
        left = ""
        if total and done > self._done_before:
            seconds = (now_s - self._began_s) * (total - done) / (done - self._done_before)
            left = f", {_clock(seconds)} left"
        share = f" ({done / total:.0%})" if total else ""
        of = f" of {total:,}" if total else ""
        print(f"{_clock(now_s - self._began_s)}  {done:,}{of} {self.bar.unit}{share}, {speed}{left}"
              f"{f'  {result}' if result else ''}", file=sys.stderr, flush=True)  # fmt: skip


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
