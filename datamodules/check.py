"""Checks an environment before anything learns in it: Gymnasium's own checks, and what runs here need."""

import contextlib
import re
import warnings
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import env_checker
from gymnasium.vector import VectorEnv
from torch.utils._pytree import tree_leaves

import rl_modules
from datamodules.environments import Environments
from datamodules.envs.boundary import require_finite_evaluation
from datamodules.envs.foreign import boundary_of
from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.masks import MASK, choices, split_space
from rl_modules.common.spaces import space_to_dict

#: Steps with random actions that are played, and played again from the same seed.
STEPS = 1000


def check_env(
    env_id: Any, env_kwargs: dict[str, Any] | None = None, wrappers: list[Any] | None = None, seed: int = 0
) -> list[str]:
    """Checks an environment as Gymnasium's ``check_env`` does, and plays it with random actions twice.

    Args:
        env_id: as of the datamodules: a Gymnasium id, the import path of a callable, or a callable.
        env_kwargs: its keyword arguments.
        wrappers: as of the datamodules.
        seed: of the episodes and the actions.

    Returns:
        One sentence for each thing that does not stop a run but is worth changing; empty if there is none.

    Raises:
        UsageError: what Gymnasium's check refuses or stops a run, such as a space that no algorithm reads.
    """
    environments = Environments(env_id, env_kwargs, wrappers, None, None, "sync", "same_step", True, seed)
    try:
        environments.open()
        found = _gymnasium(environments)
        first, ends = _play(environments, seed)
        again, _ = _play(environments, seed)
        if not ends:
            found.append(
                f"no episode ended in {STEPS:,} steps: an evaluation would play until eval_max_steps; give it "
                "a time limit with gymnasium.wrappers.TimeLimit"
            )
        equal = [all(map(np.array_equal, one, other)) for one, other in zip(first, again, strict=True)]
        if False in equal:
            found.append(
                f"the same seed and actions led to something else at step {equal.index(False)}: a run can't "
                "resume in the middle of an episode; take all randomness from self.np_random"
            )
        return found
    finally:
        environments.close()


def _gymnasium(environments: Environments) -> list[str]:
    """What Gymnasium's own check says of the environment without wrappers."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            env_checker.check_env(environments.example.unwrapped, skip_render_check=True, skip_close_check=True)
        except Exception as error:
            if split_space(environments.observation_space, environments.action_space)[1]:
                return [
                    "Gymnasium's check_env ignores action masks, and a random action ended it "
                    f"({what_happened(error)}); what it checks after a step was not checked"
                ]
            raise UsageError(
                f"the environment {environments.name} fails Gymnasium's check_env: {what_happened(error)}"
            ) from error
    texts = [re.sub(r"\x1b\[\d+m|WARN: ", "", str(one.message)) for one in said]
    # Observations are not scaled by their bounds, so infinite ones change nothing.
    return [f"Gymnasium: {text}" for text in dict.fromkeys(texts) if "infinity. This is probably too" not in text]


def algorithms_for(observation_space: spaces.Space, action_space: spaces.Space) -> list[str]:
    """Returns the names of the algorithms that can learn in these spaces with their defaults."""
    found = []
    for name in rl_modules.CONTROL:
        cls: Any = getattr(rl_modules, name)
        with contextlib.suppress(UsageError):
            cls(
                observation_space=space_to_dict(observation_space), action_space=space_to_dict(action_space)
            ).configure_model()
            found.append(name)
    return found


def _as_gymnasium(space: spaces.Space, mask: np.ndarray) -> Any:
    """Returns a flat mask as ``space.sample`` takes it."""
    flat = np.asarray(mask, np.int8).reshape(-1)
    parts = np.split(flat, np.cumsum(choices(space))[:-1])
    if isinstance(space, spaces.MultiBinary):  # 2: either
        return np.array([part[1] if part.sum() == 1 else 2 for part in parts], np.int8)
    return tuple(parts) if isinstance(space, spaces.MultiDiscrete) else flat


def _play(environments: Environments, seed: int) -> tuple[list[list[np.ndarray]], int]:
    """Plays random actions; returns observation and reward of every step as arrays, and the number of ends."""
    envs: VectorEnv = environments.make_for_evaluation(1)
    try:
        boundary, space = boundary_of(envs, environments.name), environments.action_space
        space.seed(seed)
        observation, seen, ends = boundary.reset(seed=[seed]), [], 0
        for _ in range(STEPS):
            mask = observation[MASK][0] if isinstance(observation, dict) and MASK in observation else None
            action = space.sample(None if mask is None else _as_gymnasium(space, mask))
            observation, reward, terminated, truncated, _ = boundary.step(np.asarray([action]))
            require_finite_evaluation(environments.name, "observation", observation)
            require_finite_evaluation(environments.name, "reward", reward)
            arrays = tree_leaves(observation)
            seen.append([*(np.array(array) for array in arrays), np.array(reward)])
            ends += int(terminated[0] or truncated[0])
        return seen, ends
    finally:
        envs.close()
