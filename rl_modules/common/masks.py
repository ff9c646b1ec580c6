"""Action masks: which actions a state allows, as a part of its observation.

A masked environment's observation is a dictionary with the key ``action_mask``. So a mask is stored, replayed, cut into
minibatches, evaluated and saved with the observation it belongs to, and an environment without masks pays nothing.
"""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError

#: Key of the mask in an observation.
MASK = "action_mask"
#: Key of what was observed, where that is no dictionary itself.
OBSERVED = "observation"
#: Value of what is not allowed. Finite: ``0 · -inf`` in an entropy or a KL would be NaN.
FORBIDDEN = -1e8


def mask_size(action_space: spaces.Space) -> int | None:
    """Numbers in a mask, in sb3-contrib's layout: every option of every choice; None where the space has no masks.

    Discrete(n): n. MultiDiscrete(nvec): sum(nvec), the choices side by side. MultiBinary(k): 2k, "off" and "on" of
    each switch.
    """
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.n)
    if isinstance(action_space, spaces.MultiDiscrete):
        return int(action_space.nvec.sum())
    return 2 * len(action_space.sample().reshape(-1)) if isinstance(action_space, spaces.MultiBinary) else None


def choices(action_space: spaces.Space) -> list[int]:
    """Sizes of the parts of a mask, each of which must allow something."""
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(n) for n in action_space.nvec.reshape(-1)]
    size = mask_size(action_space) or 0
    return [2] * (size // 2) if isinstance(action_space, spaces.MultiBinary) else [size]


def split_space(observation_space: spaces.Space, action_space: spaces.Space) -> tuple[spaces.Space, bool]:
    """The space without its mask, and whether there is one.

    Raises:
        UsageError: a part with the name of a mask that is none.
    """
    if not isinstance(observation_space, spaces.Dict) or MASK not in observation_space.spaces:
        return observation_space, False
    size = mask_size(action_space)
    if size is None or observation_space[MASK].shape != (size,):
        right = "which has no masks" if size is None else f"whose masks have the shape ({size},)"
        raise UsageError(f"the observation has {MASK!r} of shape {observation_space[MASK].shape}, but the action space "
                         f"is {action_space}, {right}; call that part otherwise")  # fmt: skip
    rest = {key: part for key, part in observation_space.items() if key != MASK}
    return (rest[OBSERVED] if rest.keys() == {OBSERVED} else spaces.Dict(rest)), True


def split_mask(observation: Any) -> tuple[Any, Any]:
    """What was observed, and the mask, [..., size]; None where there is none."""
    if not isinstance(observation, dict) or MASK not in observation:
        return observation, None
    rest = {key: part for key, part in observation.items() if key != MASK}
    return (rest[OBSERVED] if rest.keys() == {OBSERVED} else rest), observation[MASK]


def join_mask(observation: Any, mask: Any) -> dict[str, Any]:
    """The inverse of :func:`split_mask`."""
    return {**(observation if isinstance(observation, dict) else {OBSERVED: observation}), MASK: mask}


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """The logits of what is allowed; :data:`FORBIDDEN` for the rest.

    A final observation may allow nothing, since nobody acts in it: there everything counts as allowed.

    Args:
        logits: one per option, [..., A].
        mask: nonzero where allowed, broadcastable to ``logits``.
    """
    allowed = mask.bool()
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    return torch.where(allowed, logits, FORBIDDEN)
