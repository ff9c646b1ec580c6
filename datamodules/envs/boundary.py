"""What environments return, checked once where it enters: shapes, dtypes, numbers and errors."""

import contextlib
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from datamodules.envs.failures import raise_in_one_sentence
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves

#: Infos that Gymnasium's vectors add to those of their environments where an episode ended.
ADDED = frozenset(("final_obs", "_final_obs", "final_info", "_final_info"))


def without(names: frozenset[str], info: dict[str, Any]) -> dict[str, Any]:
    """Infos without some names."""
    return info if names.isdisjoint(info) else {key: x for key, x in info.items() if key not in names}


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
            return self.envs.step(action)
        except (Exception, SystemExit) as error:
            raise_in_one_sentence(self.envs, self.name, error)

    def finals(self, done: np.ndarray, observation: Any, info: dict[str, Any]) -> list[tuple[int, Any]]:
        """Returns environment and final observation of each ended episode, of a vector without steps for resets."""
        final = info["final_obs"] if self.mode == AutoresetMode.SAME_STEP else observation
        if isinstance(final, dict) or (isinstance(final, tuple) and isinstance(self.space, spaces.Tuple)):
            final = rows_of(final, self.envs.num_envs)  # a batch, not one of each environment
        return [(int(i), final[i]) for i in np.flatnonzero(done)]


# ---------------------------------------------------------------- numbers


def require_finite(name: str, observations: Any, reward: np.ndarray, finals: list[tuple[int, int, Any]]) -> None:
    """Refuses NaN and infinite observations [T + 1, N, *obs], rewards [T, N] and final observations."""
    what, bad = "reward", ~np.isfinite(reward)
    for leaf in () if bad.any() else tree_leaves(observations):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            what, bad = "observation", ~np.isfinite(leaf).reshape(*leaf.shape[:2], -1).all(-1)
    for t, i, final in () if bad.any() else finals:
        if not all(np.isfinite(leaf).all() for leaf in tree_leaves(final)):
            what, bad[t, i] = "observation", True
    if bad.any():
        t, i = np.argwhere(bad)[0]
        raise UsageError(
            f"environment {i} of {name} returned a NaN or infinite {what} in row {t} of this rollout; "
            "nothing was learned from it, and earlier checkpoints are untouched"
        )


def require_finite_evaluation(name: str, what: str, values: Any) -> None:
    """Refuses a step of an evaluation with a NaN or infinite ``reward`` or ``observation``."""
    if isinstance(values, dict | tuple):
        for part in values.values() if isinstance(values, dict) else values:
            require_finite_evaluation(name, what, part)
        return
    array = np.asarray(values)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        i = np.argwhere(~np.isfinite(array))[0, 0]
        raise UsageError(
            f"environment {i} of {name} returned a NaN or infinite {what} in an evaluation; the "
            "evaluation has no result, and earlier checkpoints are untouched"
        )
