"""Checks of constructor arguments."""

from rl_modules.common.errors import UsageError
from rl_modules.common.ranges import real_number, whole_number


def unit_interval(name: str, value: float, open_at_zero: bool = False) -> float:
    """``value`` as a float.

    Raises:
        UsageError: it lies outside [0, 1], or outside (0, 1] with ``open_at_zero``.
    """
    if not 0 <= real_number(name, value) <= 1 or (value == 0 and open_at_zero):
        raise UsageError(f"{name}={value} must lie in {'(' if open_at_zero else '['}0, 1]")
    return float(value)


def at_least(name: str, value: int, least: int = 1, unit: str = "") -> int:
    """``value`` as an int; a float such as 1e6 counts where it is whole.

    Raises:
        UsageError: it is no whole number, or smaller than ``least``.
    """
    return whole_number(name, value, least, unit)
