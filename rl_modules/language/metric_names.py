"""Names of training metrics as TensorBoard shows TRL's, and callbacks that monitor them."""

from collections.abc import Collection
from typing import Any

from rl_modules.common.errors import UsageError

#: Groups of metrics; a name without one belongs to training.
GROUPS = ("train/", "eval/", "test/", "time/")


def displayed_name(name: str) -> str:
    """The name of a training metric in every logger: ``train/reward`` for ``reward``, as transformers writes it."""
    return name if name.startswith(GROUPS) else f"train/{name}"


def monitors(trainer: Any) -> dict[str, str]:
    """Metrics that callbacks of a Trainer monitor, with the name of the callback's class."""
    found = {}
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            found[monitor] = type(callback).__name__
    return found


def refuse_bare_monitor(monitor: str, callback: str, known: Collection[str]) -> None:
    """Refuses a training metric that is monitored without the prefix of its group."""
    if monitor not in known and displayed_name(monitor) in known:
        raise UsageError(f"monitor={monitor!r} of {callback} is no metric; metrics of training have the prefix train/: "
                         f"did you mean {displayed_name(monitor)}?")  # fmt: skip
