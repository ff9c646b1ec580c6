"""Division of a pass over the records into optimizer steps."""

from typing import Any

from datamodules.language.notices import notice


def counts_epochs(trainer: Any) -> bool:
    """Returns whether ``max_epochs`` ends the run; only then the records that a pass leaves out matter."""
    return (getattr(trainer, "max_epochs", None) or -1) > 0


def whole_steps(n: int, step: int) -> int:
    """Returns the number of optimizer steps in one pass over the records, at least 1.

    Args:
        n: records.
        step: records of an optimizer step, over all ranks.
    """
    return max(1, n // step)


def announce_rest(n: int, step: int, fate: str) -> None:
    """Reports if a tenth of the records or more is in no step of a pass, or if records repeat within a step.

    Args:
        n: records.
        step: records of an optimizer step, over all ranks.
        fate: what becomes of the rest.
    """
    rest = n - whole_steps(n, step) * step
    if rest < 0:
        notice(f"batch_size: a step of {step} records repeats the {n} that there are; give a smaller one")
    elif rest >= n / 10:
        notice(f"batch_size: of {n} records, {step} to an optimizer step, the last {rest} of a pass {fate}")
