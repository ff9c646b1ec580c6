"""What is wrong with what an environment returned, in one sentence."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError

#: From an observation to what is wrong with it; None: nothing.
Misfit = Callable[[Any], str | None]

# ---------------------------------------------------------------- observations


def examine(observation: Any, shape: tuple[int, ...], dtype: np.dtype, known: set[Any], part: str) -> str | None:
    """How an observation differs from its space; a dtype or type of number that fits joins ``known``."""
    if isinstance(observation, Tensor):
        given: Any = observation.dtype
        found, fits = tuple(observation.shape), not observation.is_complex()
    else:
        try:
            array = np.asarray(observation)
        except ValueError:  # rows of several lengths
            array = np.asarray(None)
        if array.dtype == object:
            return f"the observation {str(observation)[:60]}, and its observation_space{part} has the shape {shape}"
        found, given = array.shape, array.dtype
        fits = np.can_cast(given, dtype, "same_kind")
        if fits and shape == found:
            known.add(observation.__class__ if isinstance(observation, int | np.number) else given)
    if found != shape:
        return f"an observation of shape {found}, and its observation_space{part} has {shape}"
    return None if fits else f"an observation of dtype {given}, and its observation_space{part} has {dtype}"


def misfit_of_parts(space: Any, batch: tuple[int, ...], part: str) -> Misfit:
    """:func:`datamodules.envs.misfits.misfit` of a Dict or Tuple space."""
    keys: Any = space.spaces if isinstance(space, spaces.Dict) else range(len(space.spaces))
    parts = {key: misfit(space[key], batch, f"{part}[{key!r}]") for key in keys}

    def nested(observation: Any) -> str | None:
        for key, check in parts.items():
            try:
                value = observation[key]
            except (KeyError, IndexError, TypeError):
                return f"an observation without {key!r}, and its observation_space{part} has that"
            if wrong := check(value):
                return wrong
        return None

    return nested


# ---------------------------------------------------------------- returns of reset and step


def require(env: gym.Env, wrong: str | None, info: Any) -> None:
    """Refuses an observation that does not fit its space, and infos that are no dictionary."""
    if wrong:
        raise UsageError(f"the environment {_name(env)} returned {wrong}; make them agree")
    if not isinstance(info, dict):
        raise _refusal(env, "info", info, "a dictionary")


def numbers(env: gym.Env, reward: Any, terminated: Any, truncated: Any) -> tuple[Any, bool, bool]:
    """Reward and ends as Python's; arrays of one element count as their element, 0 and 1 as an end."""
    ends = {"terminated": _plain(terminated), "truncated": _plain(truncated)}
    for (what, number), given in zip(ends.items(), (terminated, truncated), strict=True):
        if number is None or number not in (0, 1):
            raise _refusal(env, what, given, "true or false")
    if (value := _plain(reward)) is None:
        raise _refusal(env, "reward", reward, "a number")
    return value, bool(ends["terminated"]), bool(ends["truncated"])


def of_reset(env: gym.Env, returned: Any) -> UsageError:
    """What is said of a reset that returned something else than an observation and infos."""
    return UsageError(
        f"reset of {_name(env)} returned {_kind(returned)}; Gymnasium's reset returns (observation, "
        "info), and that of the old Gym the observation alone"
    )


def of_keywords(env: gym.Env, error: TypeError) -> UsageError:
    """What is said of a reset without Gymnasium's keywords."""
    return UsageError(f"reset of {_name(env)} must take the keywords seed and options, as Gymnasium calls it: {error}")


def of_step(env: gym.Env, returned: Any) -> UsageError:
    """What is said of a step that returned another number of values."""
    return UsageError(
        f"step of {_name(env)} returned {_kind(returned)}; Gymnasium's step returns 5: observation, "
        "reward, terminated, truncated, info (the old Gym returned done in place of the two)"
    )


def _refusal(env: gym.Env, what: str, value: Any, kind: str) -> UsageError:
    return UsageError(f"step of {_name(env)} returned {what}={value!r}; it must be {kind}")


def _plain(value: Any) -> bool | int | float | None:
    """A number of Python, NumPy or torch, or an array of one, as Python's; None for anything else."""
    try:
        value = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # several
        return None
    return value if isinstance(value, bool | int | float) else None


def _name(env: gym.Env) -> str:
    return f"{type(env).__module__}:{type(env).__name__}"


def _kind(returned: object) -> str:
    if not isinstance(returned, tuple):
        return f"a {type(returned).__name__}"
    if len(returned) != 2:
        return f"{len(returned)} values"
    return "None as the observation" if returned[0] is None else f"info={returned[1]!r}, no dictionary"


def misfit(space: spaces.Space, batch: tuple[int, ...] = (), part: str = "") -> Misfit:
    """Returns a function that says how an observation, behind dimensions ``batch``, differs from its space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return misfit_of_parts(space, batch, part)
    shape, dtype = (*batch, *(space.shape or ())), np.dtype(space.dtype)
    known: set[Any] = {dtype}  # dtypes of arrays, and types of numbers, that fit

    def leaf(observation: Any) -> str | None:
        kind = observation.__class__
        if (observation.shape == shape and observation.dtype in known) if kind is np.ndarray else kind in known:
            return None
        return examine(observation, shape, dtype, known, part)

    return leaf
