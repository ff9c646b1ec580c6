"""Vectors of environments that take and return torch tensors, on the device where they step."""

import functools
import sys
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from datamodules.envs.boundary import ADDED, rows_of, without
from rl_modules.common.modules import tree_leaves


def returns_tensors(envs: VectorEnv, seed: int) -> bool:
    """Returns whether the observations of a vector are tensors; resets the vector."""
    observation: Any = envs.reset(seed=seed)[0]
    while isinstance(observation, dict | tuple):
        observation = next(iter(observation.values() if isinstance(observation, dict) else observation))
    return isinstance(observation, Tensor)


def torch_env(envs: VectorEnv) -> Any:
    """Returns a vector of :mod:`datamodules.envs.torch`, and None for any other; does not import that."""
    module = sys.modules.get("datamodules.envs.torch.base")
    return envs if module is not None and isinstance(envs, module.TorchEnv) else None


def space_of(observation: Any) -> spaces.Space:
    """Returns the space of one of a batch of observations, tensors or arrays of JAX, whose bounds are unknown."""
    if isinstance(observation, dict):
        return spaces.Dict({name: space_of(part) for name, part in observation.items()})
    if str(observation.dtype).endswith("uint8"):
        return spaces.Box(0, 255, tuple(observation.shape[1:]), np.uint8)
    return spaces.Box(-np.inf, np.inf, tuple(observation.shape[1:]), np.float32)


def observation_tensors(space: spaces.Space, observation: Any, double: bool = False) -> Any:
    """As :func:`rl_modules.common.spaces.observation_arrays`, of tensors, without copies to a host."""
    if isinstance(space, spaces.Dict):
        return {name: observation_tensors(part, observation[name], double) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): observation_tensors(part, observation[i], double) for i, part in enumerate(space)}
    if isinstance(space, spaces.Discrete):
        return observation.long() - int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return observation.long() - _constant(space.start, observation.device)
    if double and observation.dtype is torch.float64 and space.dtype == np.float64:
        return observation
    if observation.is_floating_point() or (isinstance(space, spaces.Box) and space.dtype.kind == "f"):
        return observation.float()
    return observation if observation.dtype is torch.uint8 else observation.long()


def action_tensors(space: spaces.Space, action: Tensor) -> Tensor:
    """As :func:`rl_modules.common.spaces.to_environment`, of tensors, [N, …]."""
    if isinstance(space, spaces.Box):
        low, high = (_constant(bound, action.device) for bound in (space.low, space.high))
        clipped = action.clamp(low, high)
        return (clipped if low.is_floating_point() else clipped.round()).to(low.dtype)
    if isinstance(space, spaces.Discrete):
        return action + int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return action + _constant(space.start, action.device)
    return action


def _constant(values: np.ndarray, device: torch.device) -> Tensor:
    """An array of a space on a device, copied there once."""
    return _copied_once(values.tobytes(), values.dtype.str, values.shape, device)


@functools.lru_cache(maxsize=64)
def _copied_once(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.as_tensor(np.frombuffer(data, dtype).reshape(shape).copy(), device=device)


class AsArrays(VectorWrapper):
    """A vector of tensors as one of NumPy arrays, for evaluations and replay buffers in the host's memory."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._device = torch.device("cpu")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is not None:
            options = {name: torch.as_tensor(value).to(self._device) for name, value in options.items()}
        observation, _ = self.env.reset(seed=None if seed is None else int(np.ravel(seed)[0]), options=options)
        arrays = _arrays(observation)
        self._device = tree_leaves(_as_dicts(observation))[0].device
        return arrays, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, *rest, info = self.env.step(torch.as_tensor(actions).to(self._device))
        reward, terminated, truncated = (part.cpu().numpy() for part in rest)
        if self.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            info = without(ADDED, info)
        said = info.get("final_info", info)
        arrays = {name: _arrays(said[name]) for name in ("is_success", "_is_success") if name in said}
        if "final_obs" in info:
            arrays["final_obs"] = rows_of(_arrays(info["final_obs"]), self.num_envs)
        return _arrays(observation), reward, terminated.astype(bool), truncated.astype(bool), arrays


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _arrays(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_arrays(part) for part in value)
    return value.cpu().numpy() if isinstance(value, Tensor) else value


def _as_dicts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_dicts(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return {str(i): _as_dicts(part) for i, part in enumerate(value)}
    return value
