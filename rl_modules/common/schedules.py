"""Values that change with the share of training that is left."""

from rl_modules.common.errors import UsageError


def parse_schedule(value: float | str, name: str) -> tuple[float, bool]:
    """Read a constant or rl-baselines3-zoo's notation for linear decay.

    Args:
        value: a positive number, or ``"lin_<number>"``: from that number down to 0 over ``total_timesteps``.
        name: the argument's name, for the error.

    Returns:
        The initial value, and whether it decays.

    Raises:
        UsageError: neither a number nor ``lin_<number>``, or negative.
    """
    text = str(value)
    linear = text.startswith("lin_")
    try:
        initial = float(text.removeprefix("lin_"))
    except ValueError:
        initial = -1.0
    if not 0 <= initial < float("inf"):
        raise UsageError(f"{name}={value!r} is no schedule; give a number ≥ 0, or lin_<number> for linear decay to 0")
    return initial, linear


def schedule_value(schedule: tuple[float, bool], progress_remaining: float) -> float:
    """The schedule's value when ``progress_remaining`` (1 at the start, 0 at the end) of training is left."""
    initial, linear = schedule
    return initial * max(progress_remaining, 0.0) if linear else initial


def exploration_rate(progress_remaining: float, fraction: float, initial: float, final: float) -> float:
    """Stable-Baselines3's ε: linear from ``initial`` to ``final`` over the first ``fraction`` of training, then flat.

    Args:
        progress_remaining: 1 at the start of training, 0 at its end.
        fraction: in [0, 1]; with 0 it is ``final`` from the start.
        initial: ε at the start, in [0, 1].
        final: ε after the decay, in [0, 1].
    """
    done = 1.0 - max(progress_remaining, 0.0)
    if done >= fraction:
        return final
    return initial + (final - initial) * done / fraction
