"""Wrappers that add action masks to observations or remove them."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from rl_modules.common.errors import UsageError
from rl_modules.common.masks import MASK, choices, flat_mask, join_mask, mask_size, split_mask, split_space

#: Value instead of a source of masks: the observation's mask is removed.
IGNORED = "ignored"


def with_source(env: gym.Env, source: str) -> gym.Env:
    """Returns the environment with its masks from ``source``, or without them if that is :data:`IGNORED`."""
    return WithoutMasks(env) if source == IGNORED else ActionMasks(env, source)


class WithoutMasks(gym.ObservationWrapper):
    """Removes the mask from each observation; if only ``observation`` is left, its value replaces the dictionary."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space, _ = split_space(env.observation_space, env.action_space)

    def observation(self, observation: Any) -> Any:
        return split_mask(observation)[0]


class VectorWithoutMasks(VectorWrapper):
    """:class:`WithoutMasks` for a vector of environments, of arrays or tensors."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.single_observation_space, _ = split_space(env.single_observation_space, env.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return split_mask(observation)[0], info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, *rest, info = self.env.step(actions)
        resets = self.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
        if resets and (final := info.get("final_obs")) is not None:
            info = {**info, "final_obs": split_mask(final)[0]}
            if not isinstance(final, dict):  # one by one, None where no episode ended
                info["final_obs"] = [split_mask(one)[0] for one in final]
        return split_mask(observation)[0], *rest, info


class ActionMasks(gym.Wrapper):
    """Adds each state's mask, found at ``source``, to its observation, as ``action_mask``, uint8."""

    def __init__(self, env: gym.Env, source: str) -> None:
        super().__init__(env)
        self.source = source
        self._size = mask_size(env.action_space) or 0
        self._splits = np.cumsum([0, *choices(env.action_space)[:-1]])
        inner = env.observation_space
        parts = dict(inner.spaces) if isinstance(inner, spaces.Dict) else {"observation": inner}
        self.observation_space = spaces.Dict({**parts, MASK: spaces.Box(0, 1, (self._size,), np.uint8)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._masked(observation, info, ended=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        ended = bool(terminated or truncated)
        return self._masked(observation, info, ended), reward, terminated, truncated, info

    def _masked(self, observation: Any, info: dict[str, Any], ended: bool) -> dict[str, Any]:
        mask = flat_mask(self._given(observation, info)).astype(np.uint8)
        if mask.size != self._size:
            raise UsageError(
                f"the environment's action_mask has {mask.size} numbers; its action space "
                f"{self.action_space} has {self._size} options"
            )
        allows = np.maximum.reduceat(mask, self._splits)
        if not allows.all():
            if not ended:
                which = "" if len(allows) == 1 else f" for choice {int(np.flatnonzero(allows == 0)[0])}"
                raise UsageError(
                    f"the environment's action_mask allows no action{which}, but its episode goes on; end "
                    "the episode there, or allow an action"
                )
            mask = np.zeros(self._size, np.uint8)  # nobody acts here; tables keep what they know of the state
        return join_mask(observation, mask)

    def _given(self, observation: Any, info: dict[str, Any]) -> Any:
        if self.source == "observation":
            return observation[MASK]
        if self.source == "method":
            return self.env.get_wrapper_attr("action_masks")()
        if MASK not in info:
            raise UsageError(
                "the environment's info has no action_mask in this step, but had one after the reset; "
                "give one in every step, or data.action_masks=false"
            )
        return info[MASK]


def has_mask(env: gym.Env | VectorEnv) -> bool:
    """Returns whether the environment's observation, or that of each of a vector's, contains a mask."""
    if isinstance(env, VectorEnv):
        return split_space(env.single_observation_space, env.single_action_space)[1]
    return split_space(env.observation_space, env.action_space)[1]
