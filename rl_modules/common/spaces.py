"""Gymnasium spaces as plain data, so that a checkpoint can hold them without pickled code."""

from typing import Any

import numpy as np
from gymnasium import spaces

from rl_modules.common.errors import UsageError


def space_to_dict(space: spaces.Space) -> dict[str, Any]:
    """Describe a space with strings, numbers and lists only.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.

    Raises:
        UsageError: any other space.
    """
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "low": _bound_to_data(space.low),
            "high": _bound_to_data(space.high),
            "shape": list(space.shape),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {name: space_to_dict(part) for name, part in space.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_dict(part) for part in space]}
    raise UsageError(
        f"the space {space} is of type {type(space).__name__}; supported are Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict or Tuple of these (a gymnasium wrapper such as FlattenObservation can convert others)"
    )


def space_from_dict(data: dict[str, Any]) -> spaces.Space:
    """The inverse of :func:`space_to_dict`."""
    kind = data["type"]
    if kind == "Box":
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        low = np.broadcast_to(np.asarray(data["low"], dtype), shape)
        high = np.broadcast_to(np.asarray(data["high"], dtype), shape)
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(data["nvec"], start=data["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    if kind == "Dict":
        return spaces.Dict({name: space_from_dict(part) for name, part in data["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_from_dict(part) for part in data["spaces"]])
    raise UsageError(f"the space description has type {kind!r}; expected Box, Discrete, MultiDiscrete, MultiBinary, "
                     "Dict or Tuple")  # fmt: skip


def is_image(space: spaces.Space) -> bool:
    """True for a uint8 Box of three dimensions: what a convolutional encoder reads."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8


def _bound_to_data(bound: np.ndarray) -> Any:
    """One number when all bounds agree (an 84×84×4 image has 28,224 equal ones), else nested lists."""
    flat = bound.reshape(-1)
    return flat[0].item() if flat.size and (flat == flat[0]).all() else bound.tolist()


def observation_arrays(space: spaces.Space, observation: Any) -> Any:
    """One observation, or a batch of them, in the dtypes in which rollouts store them.

    Floats become float32, images stay uint8, other integers become int64; Discrete values are shifted to start at 0;
    Dict and Tuple become (nested) dictionaries, a Tuple's parts under the keys "0", "1", …

    Args:
        space: the space of a single observation.
        observation: what the environment returned; leading batch dimensions are kept.
    """
    if isinstance(space, spaces.Dict):
        return {name: observation_arrays(part, observation[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): observation_arrays(part, observation[i]) for i, part in enumerate(space)}
    array = np.asarray(observation)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return array.astype(np.int64) - space.start
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32, copy=False)
    return array if array.dtype == np.uint8 else array.astype(np.int64, copy=False)


def tree_map(function: Any, tree: Any, *others: Any) -> Any:
    """Apply ``function`` to the leaves of equally nested dictionaries."""
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    return function(tree, *others)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested dictionaries, in order."""
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in tree_leaves(part)]
    return [tree]


def normalize(x: np.ndarray, statistic: tuple[np.ndarray, np.ndarray, float] | None) -> np.ndarray:
    """Observations in units of their standard deviation.

    Args:
        x: [..., *shape].
        statistic: mean [*shape], standard deviation [*shape] and the bound to clip to; None returns ``x`` itself.

    Returns:
        float32, the shape of ``x``.
    """
    if statistic is None:
        return x
    mean, std, clip = statistic
    return np.clip((x - mean) / std, -clip, clip).astype(np.float32)


def to_environment(space: spaces.Space, action: np.ndarray) -> np.ndarray:
    """Actions as a Gymnasium environment takes them: Box clipped to its bounds, Discrete shifted by its start."""
    if isinstance(space, spaces.Box):
        return np.clip(action, space.low, space.high).astype(space.dtype, copy=False)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return action + space.start
    return action.astype(space.dtype, copy=False)
