"""A warning where float32 can't tell an environment's observations apart."""

from typing import Any

import numpy as np
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from datamodules.normalization import RunningMeanStd
from rl_modules.common.spaces import is_image, tree_leaves, tree_map

#: Observations after which mean and deviation are compared.
SEEN = 1000
#: |mean| ÷ deviation from which a deviation has fewer than eight steps of float32 (24 bits).
LARGEST = 2.0**20


class Digits:
    """Compares mean and deviation of the first observations of a run, and warns once.

    Args:
        space: of one observation.
        name: the environment's.
        in_double: observations in float64 are normalised in float64, and not looked at.
    """

    def __init__(self, space: spaces.Space, name: str, in_double: bool) -> None:
        self.name = name
        self.running = _statistics(space, in_double)
        self.left = SEEN if any(tree_leaves(self.running)) else 0

    def see(self, observation: Any) -> None:
        """Adds a batch, [B, *obs] in the dtypes of the environment."""
        if self.left > 0:
            tree_map(lambda running, x: running and running.update(x), self.running, observation)
            self.left -= len(tree_leaves(observation)[0])
            if self.left <= 0:
                self._warn()

    def _warn(self) -> None:
        for running in filter(None, tree_leaves(self.running)):
            deviation = np.sqrt(running.var)
            if (lost := (deviation > 0) & (np.abs(running.mean) > LARGEST * deviation)).any():
                i = tuple(np.argwhere(lost)[0])
                rank_zero_warn(f"observations of {self.name} vary by {deviation[i]:.2g} around {running.mean[i]:.7g}, "
                               "which float32 can't tell apart: return them in float64 in an observation_space of "
                               "float64 and set norm_obs=True, or subtract a constant in the environment")  # fmt: skip
                return


def _statistics(space: spaces.Space, in_double: bool) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _statistics(part, in_double) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): _statistics(part, in_double) for i, part in enumerate(space)}
    is_real = isinstance(space, spaces.Box) and space.dtype.kind == "f" and not is_image(space)
    looks = is_real and not (in_double and space.dtype == np.float64)
    return RunningMeanStd(space.shape or (), epsilon=0.0) if looks else None
