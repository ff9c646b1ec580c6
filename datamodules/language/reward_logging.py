"""Values that reward functions log in addition to their rewards, by TRL's ``log_metric`` and ``log_extra``."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

#: Arguments by which a reward function logs.
LOGGING = ("log_metric", "log_extra")


class RewardLog:
    """Values that one call of a reward function logs about its completions.

    Args:
        start: the first of them.
        count: how many.
    """

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count
        self.metrics: list[tuple[str, float]] = []
        self.columns: list[tuple[str, list[Any]]] = []

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to a curve; each counts as often as the call has completions, NaN not at all.

        Raises:
            TypeError: not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"log_metric({name!r}, {value!r}): the value must be a number") from None
        if not math.isnan(number):
            self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions.

        Raises:
            ValueError: not one value per completion.
        """
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}, …): {len(values)} values for {self.count} completions; give one "
                             "each")  # fmt: skip
        self.columns.append((str(column), values))


def means(logs: Iterable[RewardLog]) -> dict[str, tuple[float, int]]:
    """Returns the mean of each metric over completions, and its weight: the completions that it was logged for."""
    sums: dict[str, tuple[float, int]] = {}
    for log in logs:
        for name, value in log.metrics:
            total, weight = sums.get(name, (0.0, 0))
            sums[name] = total + value * log.count, weight + log.count
    return {name: (total / weight, weight) for name, (total, weight) in sums.items()}


def rows(logs: Iterable[RewardLog], count: int) -> list[dict[str, Any]]:
    """Returns the logged columns of each of a batch's completions."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for log in logs:
        for column, values in log.columns:
            for i, value in enumerate(values, log.start):
                found[i][column] = value
    return found
