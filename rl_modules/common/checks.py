"""Checks of arguments that several modules and datamodules have."""

from typing import Any

from rl_modules.common.errors import UsageError


def real_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        UsageError: it is no number.
    """
    if isinstance(value, str | bool) or not hasattr(value, "__float__"):
        raise UsageError(f"{name}={value!r} must be a number")
    return float(value)


def at_least(name: str, value: Any, least: int = 1, unit: str = "") -> int:
    """``value`` as an int; a float such as 1e6 counts where it is whole.

    Raises:
        UsageError: it is no whole number, or smaller than ``least``.
    """
    number = real_number(name, value)
    if not number.is_integer():
        raise UsageError(f"{name}={value} must be a whole number")
    if number < least:
        raise UsageError(f"{name}={value} must be at least {least}{f' {unit}' if unit else ''}")
    return int(value)


def check_widths(name: str, net_arch: Any) -> Any:
    """Refuses widths of hidden layers that are no positive whole numbers.

    Raises:
        UsageError: names the argument.
    """
    parts = net_arch.values() if isinstance(net_arch, dict) else [net_arch]
    for part in parts:
        if part is None:
            continue
        widths = part if isinstance(part, list | tuple) else [None]
        if not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths):
            raise UsageError(f"{name}={net_arch} must be a list of hidden widths of at least 1, such as [64, 64]")
    return net_arch
