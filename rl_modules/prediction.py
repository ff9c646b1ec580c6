"""Conversion of an environment's observations to the inputs of a policy's network."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rl_modules.common.errors import UsageError
from rl_modules.common.masks import OBSERVED, choices, flat_mask, join_mask, mask_size, split_mask
from rl_modules.common.modules import in_double, is_double
from rl_modules.common.spaces import normalize, observation_arrays, require_observation, tree_leaves, tree_map


def policy_input(module: Any, observation: Any, action_masks: Any) -> tuple[Any, int, bool]:
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
        raise UsageError(f"action_masks has {array.size} entries; {n} observations and the action space {space} need "
                         f"{f'{n} x {size}' if size else 'none'}")  # fmt: skip
    rows = array.reshape(n, size)
    first = np.cumsum([0, *choices(space)[:-1]])
    allows = np.logical_or.reduceat(rows, first, axis=1).all(1, keepdims=True)
    if may_be_over:
        return rows | ~allows
    if not allows.all():
        raise UsageError("action_masks allows no action in some row; allow one for each choice")
    return rows
