"""Values that change with the remaining share of training."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from rl_modules.common.errors import UsageError

#: What a scheduled argument may be, and what a file may say of it: see :func:`as_notation`.
Rate = Annotated[float | str | Callable[[float], float], float | str]
OptionalRate = Annotated[float | str | Callable[[float], float] | None, float | str | None]
#: Parts into which training is divided for a schedule that is a function.
_PARTS = 1000
#: Largest difference of the straight lines from that function, as a share of its largest value.
_TOLERANCE = 1e-4


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


def as_notation(value: Any) -> Any:
    """Returns the points of a schedule that is a function, which a checkpoint can hold; another value as it is.

    Args:
        value: among others a function from the remaining share of training, 1 to 0, as Stable-Baselines3 takes it. It
            is called here alone, at 1,001 places, and points on it are kept between which straight lines differ from it
            by at most 1e-4 of its largest value; a jump becomes a ramp of a thousandth of training.
    """
    if not callable(value):
        return value
    points = [(i / _PARTS, float(value(1.0 - i / _PARTS))) for i in range(_PARTS + 1)]
    kept = _thinned(points, _TOLERANCE * max(abs(y) for _, y in points))
    return kept[0][1] if len({y for _, y in kept}) == 1 else ", ".join(f"{x:g}:{y:.6g}" for x, y in kept)


def _thinned(points: list[tuple[float, float]], tolerance: float) -> list[tuple[float, float]]:
    """Returns the ends, and between them the points that straight lines need (Ramer, Douglas and Peucker)."""
    (begin, first), (end, last) = points[0], points[-1]
    away = [abs(first + (last - first) * (x - begin) / (end - begin) - y) for x, y in points]
    worst = max(range(len(points)), key=away.__getitem__)
    if not away[worst] > tolerance:
        return [points[0], points[-1]]
    return [*_thinned(points[: worst + 1], tolerance)[:-1], *_thinned(points[worst:], tolerance)]


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
