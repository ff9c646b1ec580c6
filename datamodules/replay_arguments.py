"""Checks of replay's arguments, some of which exclude each other, and of the memory that they need."""

from typing import Any

from datamodules.free_memory import available_bytes
from datamodules.hindsight import check_hindsight
from rl_modules.common.errors import UsageError, at_least

#: Default values of the arguments that prioritised replay alone reads.
_PRIORITIES = {"prioritized_replay_alpha": 0.6, "prioritized_replay_beta0": 0.4, "prioritized_replay_eps": 1e-6}


def check_arguments(hp: Any, n_envs: int, total_timesteps: int) -> None:
    """Refuses arguments that contradict each other, and those without effect with the others.

    Args:
        hp: hyperparameters of a replay datamodule.
        n_envs: number of environments, which a vector brings.
        total_timesteps: of the run.

    Raises:
        UsageError: names the argument, its value and what would be right.
    """
    if hp.learning_starts >= total_timesteps:
        raise UsageError(f"learning_starts={hp.learning_starts} must lie in [0, total_timesteps={total_timesteps}): "
                         "nothing would be left to learn in")  # fmt: skip
    kept = hp.checkpoint_buffer_size
    if kept is not None and kept < n_envs:
        raise UsageError(f"checkpoint_buffer_size={kept} must be at least n_envs={n_envs}, a row of each environment; "
                         "or None for all rows")  # fmt: skip
    for name, value in _PRIORITIES.items():
        if not hp.prioritized_replay and hp[name] != value:
            raise UsageError(f"{name}={hp[name]} does nothing while prioritized_replay is false; set that to true")
    check_hindsight(hp)


def parse_train_freq(given: Any, default: int) -> tuple[int, bool]:
    """Returns the number of ``train_freq``, and whether it counts episodes.

    Args:
        given: a number of steps, a number and a unit, or None.
        default: in steps, where nothing is given.

    Raises:
        UsageError: neither a number ≥ 1 nor a number and a unit.
    """
    if isinstance(given, tuple | list):
        if len(given) != 2 or not isinstance(given[0], int) or given[1] not in ("step", "episode"):
            raise UsageError(f'train_freq={given!r} must be a number of steps, or [number, "step"] or [number, '
                             '"episode"]')  # fmt: skip
        return at_least("train_freq", given[0]), given[1] == "episode"
    return at_least("train_freq", default if given is None else given), False


def require_memory(buffer_size: int, needed: int) -> str:
    """Returns how much memory a buffer will take and how much is free, as a sentence.

    Args:
        buffer_size: its rows.
        needed: bytes.

    Raises:
        UsageError: the buffer needs more memory than is available.
    """
    free = available_bytes()
    needs, has = _readable(needed), _readable(free)
    if needed > free:
        raise UsageError(f"buffer_size={buffer_size} needs {needs} of memory, but {has} are free; "
                         f"{int(buffer_size * free / needed * 0.8)} would fit")  # fmt: skip
    return f"The replay buffer takes up to {needs} of memory; {has} are free."


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
