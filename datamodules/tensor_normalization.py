"""Running statistics of observations and returns that stay on a device."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from datamodules.normalizers import Normalizers
from rl_modules.common.spaces import example_arrays, tree_map


class TensorNormalizers:
    """The normalisers of a run, applied to tensors on their device.

    A rollout is normalised by the statistics from before it, and then changes them as a whole: numbers go to the host
    once per rollout. (Those of NumPy arrays change with every step.)

    Args:
        normalizers: whose statistics are used and updated.
        space: of one observation.
        device: of the environments.
    """

    def __init__(self, normalizers: Normalizers, space: spaces.Space, device: torch.device) -> None:
        self.normalizers = normalizers

        def on_device(statistic: Any, example: np.ndarray) -> Any:
            if statistic is None:
                return None
            mean, std, clip = statistic
            return *(torch.from_numpy(np.asarray(x, example.dtype)).to(device) for x in (mean, std)), clip

        # The CPU's statistics are float64; those of a device are where its observations may be.
        given = normalizers.statistics()
        examples = example_arrays(space, double=device.type != "mps")
        self.statistics = None if given is None else tree_map(on_device, given, examples)

    def observation(self, observation: Any) -> Any:
        """Observations, [..., *obs], in units of their running standard deviation, or as they are."""
        return observation if self.statistics is None else tree_map(_normalize, observation, self.statistics)

    def reward(self, reward: Tensor, done: Tensor, valid: Tensor) -> Tensor:
        """Returns a rollout's rewards, [T, N], scaled or as they are; the statistics of returns are updated.

        Args:
            reward: as the environments returned it, [T, N].
            done: the episode ended, [T, N].
            valid: false in rows that are no transitions, [T, N].
        """
        normalizer = self.normalizers.of_rewards
        if normalizer is None:
            return reward
        scale, running = float(normalizer.running.scale()), torch.from_numpy(normalizer.returns).to(reward)
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            running = torch.where(valid[t], running * normalizer.gamma + reward[t], running)
            returns[t] = running
            running = torch.where(done[t], 0.0, running)
        normalizer.running.merge(*_moments(returns, valid))
        normalizer.returns = running.double().cpu().numpy()
        return (reward / scale).clamp(-normalizer.clip, normalizer.clip)

    def update(self, observation: Any, valid: Tensor) -> None:
        """Adds a rollout's observations, [T, N, *obs] as the environments returned them, to the statistics."""
        if self.normalizers.of_observations is not None:
            tree_map(lambda running, x: running and running.merge(*_moments(x, valid)),
                     self.normalizers.of_observations.running, observation)  # fmt: skip


def _normalize(x: Tensor, statistic: Any) -> Tensor:
    if statistic is None:
        return x.float() if x.dtype is torch.float64 else x
    mean, std, clip = statistic
    return ((x - mean) / std).clamp(-clip, clip).float()


def _moments(x: Tensor, valid: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean and variance over the valid rows of [T, N, *shape], and how many these are."""
    weight = valid.reshape(*valid.shape, *[1] * (x.dim() - 2)).double()
    count = valid.sum()
    mean = (x * weight).sum((0, 1)) / count
    variance = ((x - mean).square() * weight).sum((0, 1)) / count
    return mean.cpu().numpy(), variance.cpu().numpy(), int(count)
