"""Running episodes of a vector environment, saved as seeds and actions and restored by repeating them."""

import contextlib
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from rl_modules.common.spaces import observation_arrays, tree_leaves


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


def episode_states(envs: Any) -> list[dict[str, Any]]:
    """Stream, number and actions of every running episode, as plain data."""
    return [
        {**episode, "actions": torch.from_numpy(np.array(episode["actions"])) if episode["actions"] else None}
        for episode in envs.get_attr("episode_state")
    ]


def episode_states_or_none(envs: Any) -> list[dict[str, Any]] | None:
    """:func:`episode_states`; None where the environments failed or were interrupted in a step."""
    closed, pending = gym.error.ClosedEnvironmentError, gym.error.AlreadyPendingCallError
    with contextlib.suppress(gym.error.Error, closed, pending, OSError, EOFError):
        return episode_states(envs)
    return None


def repeat_episodes(
    envs: Any, episodes: list[dict[str, Any]], space: spaces.Space, reached: Any, resets_next: np.ndarray
) -> np.ndarray:
    """Repeats every running episode up to its last step.

    Args:
        envs: a freshly reset vector.
        episodes: what :func:`episode_states` returned.
        space: space of one observation.
        reached: the observations that the episodes were at, [N, *obs] arrays.
        resets_next: which environments reset in their next step, [N].

    Returns:
        True where the repetition led to another observation, [N].
    """
    replays = [
        {**e, "actions": [] if e["actions"] is None else list(e["actions"].numpy()), "resets_next": bool(resets)}
        for e, resets in zip(episodes, resets_next, strict=True)
    ]
    envs.set_attr("episode_state", replays)
    now = [tree_leaves(observation_arrays(space, o, double=True)) for o in envs.get_attr("last_observation")]
    then = tree_leaves(reached)
    return np.array([
        any(not np.array_equal(a.astype(b.dtype), b[i]) for a, b in zip(leaves, then, strict=True))
        for i, leaves in enumerate(now)
    ])  # fmt: skip


def place_episodes(envs: Any, episodes: list[dict[str, Any]]) -> None:
    """Resets environments to the beginning of running episodes, without repeating their actions.

    Args:
        envs: a freshly reset vector.
        episodes: what :func:`episode_states` returned; empty where the environments had failed: the first episodes.
    """
    if episodes:
        lives = [len(e.get("resets", ())) for e in episodes]  # each began an episode of its own
        states = [
            {**e, "episode": e["episode"] + n, "actions": [], "resets": []}
            for e, n in zip(episodes, lives, strict=True)
        ]
        envs.set_attr("episode_state", states)


def begin_next_episodes(envs: Any, which: np.ndarray, space: spaces.Space) -> dict[int, Any]:
    """Begins the next episode in the chosen environments; returns their first observations by index."""
    states = envs.get_attr("episode_state")
    begun: dict[str, Any] = {"actions": [], "resets": [], "resets_next": False}
    fresh = [{**s, "episode": s["episode"] + 1 + len(s.get("resets", ())), **begun} if w else s
             for s, w in zip(states, which, strict=True)]  # fmt: skip
    envs.set_attr("episode_state", fresh)
    last = envs.get_attr("last_observation")
    return {int(i): observation_arrays(space, last[i], double=True) for i in np.flatnonzero(which)}
