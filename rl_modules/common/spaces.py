"""Gymnasium spaces: as plain data, which a checkpoint may hold, and what is in them as arrays and a policy's inputs."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

from rl_modules.common.errors import UsageError
from rl_modules.common.images import image_channels
from rl_modules.common.masks import OBSERVED, choices, flat_mask, join_mask, mask_size, split_mask
from rl_modules.common.modules import in_double, is_double, tree_leaves, tree_map

if TYPE_CHECKING:
    from rl_modules.base import ControlModule

#: The spaces of an environment, by the names of its attributes and of the hyperparameters.
SPACES = ("observation_space", "action_space")


def space_to_dict(space: spaces.Space) -> dict[str, Any]:
    """Describes a space with strings, numbers and lists only."""
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "low": _bound_to_data(space.low),
            "high": _bound_to_data(space.high),
            "shape": list(space.shape),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), **_integers_of(space)}
    if isinstance(space, spaces.MultiDiscrete):
        sizes = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", **sizes, **_integers_of(space)}
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
        return spaces.Discrete(**{name: value for name, value in data.items() if name != "type"})
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(**{name: value for name, value in data.items() if name != "type"})
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    if kind == "Dict":
        return spaces.Dict({name: space_from_dict(part) for name, part in data["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_from_dict(part) for part in data["spaces"]])
    raise UsageError(
        f"the space description has type {kind!r}; expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    )


def _integers_of(space: spaces.Discrete | spaces.MultiDiscrete) -> dict[str, str]:
    """Returns the dtype of a space's integers, if it is not the default."""
    return {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}


def require_observation(space: spaces.Space, arrays: Any) -> bool:
    """Returns whether this is one observation (true) or a batch (false)."""
    expected = tree_leaves(example_arrays(space))
    given = tree_leaves(arrays)
    batch = given[0].ndim - expected[0].ndim
    for leaf, like in zip(given, expected, strict=True):
        if batch not in (0, 1) or leaf.shape[batch:] != like.shape:
            raise UsageError(
                f"the observation has shape {leaf.shape}; the space has {like.shape}, or [B, *shape] for a batch"
            )
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise UsageError("the observation holds NaN or infinite numbers; a policy can't act on them")
    return batch == 0


def is_image(space: spaces.Space) -> bool:
    """Returns whether a convolutional encoder reads the space; :mod:`rl_modules.common.images` decides."""
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        return False

    return image_channels(space) is not None


def _bound_to_data(bound: np.ndarray) -> Any:
    """One number when all bounds agree (an 84×84×4 image has 28,224 equal ones), else nested lists."""
    flat = bound.reshape(-1)
    return flat[0].item() if flat.size and (flat == flat[0]).all() else bound.tolist()


def observation_arrays(space: spaces.Space, observation: Any, double: bool = False) -> Any:
    """One observation, or a batch of them, in the dtypes in which rollouts store them.

    Floats become float32, images stay uint8, other integers become int64; Discrete values are shifted to start at 0;
    Dict and Tuple become (nested) dictionaries, a Tuple's parts under the keys "0", "1", … With ``double`` spaces of
    float64 keep it, for what is normalised before it becomes float32.
    """
    if isinstance(space, spaces.Dict):
        return {name: observation_arrays(part, observation[name], double) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): observation_arrays(part, observation[i], double) for i, part in enumerate(space)}
    array = np.asarray(observation)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        choice = array.astype(np.int64) - space.start
        # As unsigned numbers, negative ones exceed every bound. A table would index them from its end.
        if (choice.view(np.uint64) >= (space.n if isinstance(space, spaces.Discrete) else space.nvec)).any():
            raise UsageError(
                f"an observation is {array.tolist()}, which is outside of its space {space}; the "
                "environment's observation_space must hold what it returns"
            )
        return choice
    # Integers in a space of floats, such as the zeros after a reset, are converted, because later values have
    # fractions.
    whole = isinstance(space, spaces.Box) and space.dtype.kind == "f" and array.dtype.kind in "biu"
    if np.issubdtype(array.dtype, np.floating) or whole:
        return array.astype(np.float64 if double and space.dtype == np.float64 else np.float32, copy=False)
    return array if array.dtype == np.uint8 else array.astype(np.int64, copy=False)


def example_arrays(space: spaces.Space, double: bool = False) -> Any:
    """Zeros as :func:`observation_arrays` makes them of an observation; Gymnasium can't sample every Box."""
    if isinstance(space, spaces.Dict):
        return {name: example_arrays(part, double) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): example_arrays(part, double) for i, part in enumerate(space)}
    if np.issubdtype(space.dtype, np.floating):
        return np.zeros(space.shape, np.float64 if double and space.dtype == np.float64 else np.float32)
    is_bytes = isinstance(space, spaces.Box) and space.dtype == np.uint8  # choices of any dtype are int64
    return np.zeros(space.shape, np.uint8 if is_bytes else np.int64)


def normalize(x: np.ndarray, statistic: tuple[np.ndarray, np.ndarray, float] | None) -> np.ndarray:
    """Returns observations in units of their deviation, float32; without a statistic unchanged, float64 as float32."""
    if statistic is None:
        return x.astype(np.float32) if x.dtype == np.float64 else x
    mean, std, clip = statistic
    return np.clip((x - mean) / std, -clip, clip).astype(np.float32)


def to_environment(space: spaces.Space, action: np.ndarray) -> np.ndarray:
    """Actions as an environment takes them: a Box's clipped, and rounded if whole, others shifted by the start."""
    if isinstance(space, spaces.Box):
        clipped = np.clip(action, space.low, space.high)
        if space.dtype.kind in "iu":
            clipped = np.rint(clipped)
        return clipped.astype(space.dtype, copy=False)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        action = action + space.start
    return action.astype(space.dtype, copy=False)


# ---------------------------------------------------------------- inputs of a policy


def policy_input(module: "ControlModule", observation: Any, action_masks: Any) -> tuple[Any, int, bool]:
    """Converts one observation or a batch to tensors on the module's device, normalised and with their masks."""
    space = module.observation_space
    try:
        observation, mask = split_mask(observation)
        if isinstance(observation, dict) and not isinstance(space, spaces.Dict | spaces.Tuple):
            observation = observation[OBSERVED]
        arrays = observation_arrays(space, observation, double=module.observation_statistics is not None)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        pair = isinstance(observation, tuple) and len(observation) == 2
        hint = "; it looks like the pair that reset returns, of which the observation is the first" if pair else ""
        shown = f"{str(observation)[:80]!r} (type {type(observation).__name__})"
        raise UsageError(f"the observation {shown} does not fit the space {space}{hint}") from error
    single = require_observation(space, arrays)
    if single:
        arrays = tree_map(lambda x: np.asarray(x)[None], arrays)
    n = len(tree_leaves(arrays)[0])
    if module.observation_statistics is not None:
        arrays = tree_map(normalize, arrays, split_mask(module.observation_statistics)[0])
    if action_masks is not None or not module.masks_actions:
        mask = action_masks
    if mask is not None:
        # A vector environment returns final observations with the others, and needs an action for them.
        may_be_over = action_masks is None and not single
        arrays = join_mask(arrays, mask_rows(module.action_space, mask, n, may_be_over))
    # Torch accepts no arrays with negative strides, such as an image turned upside down.
    tensors = tree_map(lambda x: torch.as_tensor(np.ascontiguousarray(x)).to(module.device), arrays)
    return (in_double(tensors) if is_double(module) else tensors), n, single


def mask_rows(space: spaces.Space, mask: Any, n: int, may_be_over: bool = False) -> np.ndarray:
    """Action masks of n observations, [n, size] bool."""
    array, size = flat_mask(mask), mask_size(space)
    if size is None or array.size != n * size:
        raise UsageError(
            f"action_masks has {array.size} entries; {n} observations and the action space {space} need "
            f"{f'{n} x {size}' if size else 'none'}"
        )
    rows = array.reshape(n, size)
    first = np.cumsum([0, *choices(space)[:-1]])
    allows = np.logical_or.reduceat(rows, first, axis=1).all(1, keepdims=True)
    if may_be_over:
        return rows | ~allows
    if not allows.all():
        raise UsageError("action_masks allows no action in some row; allow one for each choice")
    return rows
