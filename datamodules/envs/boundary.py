"""What environments return, checked where it enters: shapes and dtypes at first, numbers and errors always."""

import contextlib
from textwrap import shorten
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from torch.utils._pytree import tree_map

from datamodules.envs.failures import raise_in_one_sentence
from rl_modules.common.errors import UsageError

#: Infos that Gymnasium's vectors add to those of their environments where an episode ended.
ADDED = frozenset(("final_obs", "_final_obs", "final_info", "_final_info"))


def without(names: frozenset[str], info: dict[str, Any]) -> dict[str, Any]:
    """Infos without some names."""
    return info if names.isdisjoint(info) else {key: x for key, x in info.items() if key not in names}


def require_fit(name: str, space: spaces.Space, observation: Any) -> None:
    """Refuses an observation that NumPy can't store as its space says; of tensors, the shapes are compared."""
    arrays = tree_map(lambda x: np.zeros(x.shape, bool) if isinstance(x, torch.Tensor) else x, observation)
    stored: Any = create_empty_array(space, 1)
    try:
        concatenate(space, [arrays], stored)
    except (TypeError, ValueError, LookupError) as error:
        shown = shorten(str(observation), 80, placeholder=" …")
        shown += f" of shape {np.shape(arrays)}" if hasattr(arrays, "shape") else ""
        raise UsageError(
            f"the environment {name} returned the observation {shown}, which does not fit its "
            f"observation_space {shorten(str(space), 80, placeholder=' …')} of shape {space.shape}: "
            f"{type(error).__name__}: {error}"
        ) from error


def rows_of(batch: Any, n: int) -> list[Any]:
    """Returns the observations of each environment, from their batch."""
    if isinstance(batch, dict):
        parts = {name: rows_of(part, n) for name, part in batch.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(n)]
    if isinstance(batch, tuple):
        return list(zip(*(rows_of(part, n) for part in batch), strict=True))
    return [batch[i] for i in range(n)]


def has_episodes(envs: VectorEnv) -> bool:
    """Returns whether the vector consists of single environments that know their episodes; an engine's do not."""
    if not hasattr(envs, "get_attr"):
        return False
    with contextlib.suppress(Exception):
        if isinstance(envs, AsyncVectorEnv):  # a worker that is asked for an attribute it lacks ends
            return all(envs.call("has_wrapper_attr", "episode_state"))
        envs.get_attr("episode_state")
        return True
    return False


class Boundary:
    """Resets and steps a vector of :class:`~datamodules.envs.episodes.SeededEpisodes`, which check what they return."""

    #: Whether the vector consists of single environments that know their episodes.
    has_episodes = True

    def __init__(self, envs: VectorEnv, name: str) -> None:
        self.envs, self.name, self.space = envs, name, envs.single_observation_space
        self.mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)

    def reset(self, **arguments: Any) -> Any:
        """Returns the observations after a reset of the vector."""
        return self.reset_with_infos(**arguments)[0]

    def reset_with_infos(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        try:
            return self.envs.reset(**arguments)
        except (Exception, SystemExit) as error:
            raise_in_one_sentence(self.envs, self.name, error)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Returns what a step returned; Gymnasium's own infos are there only where the vector resets in it."""
        try:
            observation, reward, terminated, truncated, info = self.envs.step(action)
            return observation, reward, terminated, truncated, info
        except (Exception, SystemExit) as error:
            raise_in_one_sentence(self.envs, self.name, error)

    def finals(self, done: np.ndarray, observation: Any, info: dict[str, Any]) -> list[tuple[int, Any]]:
        """Returns environment and final observation of each ended episode, of a vector without steps for resets."""
        final = info["final_obs"] if self.mode == AutoresetMode.SAME_STEP else observation
        if isinstance(final, dict) or (isinstance(final, tuple) and isinstance(self.space, spaces.Tuple)):
            final = rows_of(final, self.envs.num_envs)  # a batch, not one of each environment
        return [(int(i), final[i]) for i in np.flatnonzero(done)]


# ---------------------------------------------------------------- numbers

#: The largest numbers that a run learns from, by their dtype: a sum of squares beyond them is infinite.
LARGEST: dict[Any, float] = {np.dtype(np.float32): 1e18, torch.float32: 1e18}
LARGEST_OF_OTHERS = 1e150
_UNTOUCHED = "earlier checkpoints are untouched"


def largest(dtype: Any) -> float:
    """Returns the largest number of a dtype that a run learns from."""
    return LARGEST.get(dtype, LARGEST_OF_OTHERS)


def require_numbers(name: str, what: str, values: np.ndarray, row: int | None = None, first: int = 0) -> None:
    """Refuses NaN, infinite and too large numbers before any state depends on them.

    Args:
        name: the environment's.
        what: ``observation`` or ``reward``.
        values: those of several rows, [T, N, …], or with ``row`` of one, [N, …].
        row: its number.
        first: the number of the first environment among them.
    """
    # NaN is not at most a number.
    if values.dtype.kind != "f" or (np.abs(values) <= (limit := largest(values.dtype))).all():
        return
    index = tuple(np.argwhere(~(np.abs(values) <= limit))[0])
    t, i = index[:2] if row is None else (row, index[0])
    where = f"in row {t} of this rollout; nothing was learned from it, and {_UNTOUCHED}"
    _refuse_number(name, what, i + first, values[index], limit, where)


def require_finite_evaluation(name: str, what: str, values: Any) -> None:
    """Refuses a step of an evaluation with a NaN, infinite or too large ``reward`` or ``observation``."""
    if isinstance(values, dict | tuple):
        for part in values.values() if isinstance(values, dict) else values:
            require_finite_evaluation(name, what, part)
        return
    array = np.asarray(values)
    if array.dtype.kind == "f" and not (np.abs(array) <= (limit := largest(array.dtype))).all():
        index = tuple(np.argwhere(~(np.abs(array) <= limit))[0])
        where = f"in an evaluation; the evaluation has no result, and {_UNTOUCHED}"
        _refuse_number(name, what, index[0], array[index], limit, where)


def _refuse_number(name: str, what: str, i: int, value: float, limit: float, where: str) -> NoReturn:
    found = f"the {what} {value:g}, beyond ±{limit:g}," if np.isfinite(value) else f"a NaN or infinite {what}"
    raise UsageError(f"environment {i} of {name} returned {found} {where}")
