"""Values that change with the remaining share of training."""

import math
from itertools import pairwise
from typing import NamedTuple

from rl_modules.common.errors import UsageError


class Schedule(NamedTuple):
    """A value over the course of training; :func:`parse_schedule` makes it, :func:`schedule_value` reads it."""

    #: At the start of training.
    initial: float
    #: Whether it changes.
    decays: bool
    #: ``constant``, ``lin``, ``cosine`` or ``points``.
    shape: str = "constant"
    #: Share of training done and value there, in order; with straight lines between.
    points: tuple[tuple[float, float], ...] = ()


def parse_schedule(value: float | str, name: str) -> Schedule:
    """Parses a constant, or one of the notations for values that change over ``total_timesteps``."""
    text = str(value)
    shape = next((shape for shape in ("lin", "cosine") if text.startswith(f"{shape}_")), "constant")
    if ":" in text:
        points = tuple(tuple(_number(part) for part in point.split(":")) for point in text.split(","))
        if all(len(point) == 2 and 0 <= point[0] <= 1 and point[1] >= 0 for point in points) and all(
            a[0] < b[0] for a, b in pairwise(points)
        ):
            pairs = tuple((point[0], point[1]) for point in points)
            return Schedule(pairs[0][1], True, "points", pairs)
        initial = -1.0
    else:
        initial = _number(text.removeprefix(f"{shape}_"))
    if not 0 <= initial < float("inf"):
        raise UsageError(
            f"{name}={value!r} is no schedule; give a number ≥ 0, lin_<number> or cosine_<number> for a "
            "decay to 0, or points <share done>:<number>, … with rising shares in [0, 1]"
        )
    return Schedule(initial, shape != "constant", shape)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0


def schedule_value(schedule: Schedule, progress_remaining: float) -> float:
    """Returns the schedule's value when ``progress_remaining`` (1 at the start, 0 at the end) of training is left."""
    if not schedule.decays:
        return schedule.initial
    left = max(progress_remaining, 0.0)
    if schedule.shape == "lin":
        return schedule.initial * left
    if schedule.shape == "cosine":
        return schedule.initial * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
    done = 1.0 - left
    for (begin, first), (end, last) in pairwise(schedule.points):
        if done <= end:
            return first + (last - first) * max(done - begin, 0.0) / (end - begin)
    return schedule.points[-1][1]
