"""Action masks: which actions a state allows, as a part of its observation.

A masked environment's observation is a dictionary with the key ``action_mask``. A mask is therefore stored, replayed,
cut into minibatches, evaluated and saved with its observation, and an environment without masks has no overhead.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError

#: Key of the mask in an observation.
MASK = "action_mask"
#: Key of the observation proper, if that is not a dictionary itself.
OBSERVED = "observation"
#: Logit of a forbidden action. It is finite, because ``0 · -inf`` in an entropy or a KL would be NaN.
FORBIDDEN = -1e8


def mask_size(action_space: spaces.Space) -> int | None:
    """Returns the length of a mask in sb3-contrib's layout, every option of every choice; None: there are no masks.

    Discrete(n): n. MultiDiscrete(nvec): sum(nvec). MultiBinary(k): 2k, "off" and "on" of each switch.
    """
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.n)
    if isinstance(action_space, spaces.MultiDiscrete):
        return int(action_space.nvec.sum())
    return 2 * len(action_space.sample().reshape(-1)) if isinstance(action_space, spaces.MultiBinary) else None


def choices(action_space: spaces.Space) -> list[int]:
    """Returns the sizes of the parts of a mask, each of which must allow at least one option."""
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(n) for n in action_space.nvec.reshape(-1)]
    size = mask_size(action_space) or 0
    return [2] * (size // 2) if isinstance(action_space, spaces.MultiBinary) else [size]


def flat_mask(mask: Any) -> np.ndarray:
    """Masks in sb3-contrib's layout, or in parts such as one for each choice, as a flat array of bool."""
    is_ragged = isinstance(mask, np.ndarray) and mask.dtype == object
    if is_ragged or (isinstance(mask, list | tuple) and len(mask) and isinstance(mask[0], list | tuple | np.ndarray)):
        return np.concatenate([flat_mask(part) for part in mask])
    return np.asarray(mask).reshape(-1).astype(bool)


def split_space(observation_space: spaces.Space, action_space: spaces.Space) -> tuple[spaces.Space, bool]:
    """Returns the space without its mask, and whether there is one."""
    if not isinstance(observation_space, spaces.Dict) or MASK not in observation_space.spaces:
        return observation_space, False
    size = mask_size(action_space)
    if size is None or observation_space[MASK].shape != (size,):
        right = "which has no masks" if size is None else f"whose masks have the shape ({size},)"
        raise UsageError(
            f"the observation has {MASK!r} of shape {observation_space[MASK].shape}, but the action space "
            f"is {action_space}, {right}; call that part otherwise"
        )
    rest = {key: part for key, part in observation_space.items() if key != MASK}
    return (rest[OBSERVED] if rest.keys() == {OBSERVED} else spaces.Dict(rest)), True


def split_mask(observation: Any) -> tuple[Any, Any]:
    """Splits an observation into the observation proper and the mask, [..., size], or None if there is none."""
    if not isinstance(observation, dict) or MASK not in observation:
        return observation, None
    rest = {key: part for key, part in observation.items() if key != MASK}
    return (rest[OBSERVED] if rest.keys() == {OBSERVED} else rest), observation[MASK]


def join_mask(observation: Any, mask: Any) -> dict[str, Any]:
    """The inverse of :func:`split_mask`."""
    return {**(observation if isinstance(observation, dict) else {OBSERVED: observation}), MASK: mask}


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Replaces the logits of forbidden options by :data:`FORBIDDEN`; where nothing is allowed, all options count."""
    allowed = mask.bool()
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    return torch.where(allowed, logits, FORBIDDEN)
