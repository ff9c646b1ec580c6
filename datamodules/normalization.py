"""Running statistics of observations and returns."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rl_modules.common.errors import UsageError
from rl_modules.common.masks import MASK
from rl_modules.common.spaces import is_image, normalize, tree_leaves, tree_map
from rl_modules.core.state import Stateful, like, persistent


class RunningMeanStd:
    """Mean and variance of everything seen so far, merged batch by batch in float64.

    Args:
        shape: shape of one sample.
        epsilon: weight of the prior (mean 0, variance 1), as in SB3 and Gymnasium.

    Source: Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self, shape: tuple[int, ...], epsilon: float = 1e-4) -> None:
        self.mean = np.zeros(shape, np.float64)
        self.var = np.ones(shape, np.float64)
        self.count = epsilon
        # With several ranks: the shared statistics, and those of this rank's samples since.
        self._shared: tuple[np.ndarray, np.ndarray, float] | None = None
        self._own: RunningMeanStd | None = None

    def update(self, batch: np.ndarray) -> None:
        """Merges a batch, [B, *shape]."""
        if len(batch) == 0:
            return
        batch = batch.astype(np.float64)
        self.merge(batch.mean(0), batch.var(0), len(batch))

    def merge(self, mean: np.ndarray, var: np.ndarray, count: float) -> None:
        """Merges ``count`` samples of this mean and (biased) variance, [*shape] each."""
        self._merge(mean, var, count)
        if self._own is not None:
            self._own._merge(mean, var, count)

    def _merge(self, mean: np.ndarray, var: np.ndarray, count: float) -> None:
        if count == 0:
            return
        delta = mean - self.mean
        total = self.count + count
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean = self.mean + delta * count / total
        self.var = squares / total
        self.count = total

    # ---------------------------------------------------------------- several ranks

    def track_own(self) -> None:
        """Starts to track this rank's samples separately; all ranks have the same statistics at this time."""
        self._shared = (self.mean, self.var, self.count)
        self._own = RunningMeanStd(self.mean.shape, epsilon=0.0)

    def own(self) -> np.ndarray:
        """Mean, variance and count of what this rank has seen since :meth:`track_own`, flat."""
        own = self._own or RunningMeanStd(self.mean.shape, epsilon=0.0)
        return np.concatenate([own.mean.ravel(), own.var.ravel(), [own.count]])

    def merge_ranks(self, parts: list[np.ndarray]) -> None:
        """Merges every rank's :meth:`own` into the shared statistics, in the same order on each rank."""
        if self._shared is not None:
            self.mean, self.var, self.count = self._shared
        for part in parts:
            mean, var = (x.reshape(self.mean.shape) for x in np.split(part[:-1], 2))
            self._merge(mean, var, float(part[-1]))
        self.track_own()

    def scale(self) -> np.ndarray:
        """Standard deviation, kept away from 0."""
        return np.sqrt(self.var + 1e-8)

    def state_dict(self) -> dict[str, Any]:
        state = _as_tensors(self.mean, self.var, self.count)
        if self._shared is None or self._own is None:
            return state
        return {**state, "shared": _as_tensors(*self._shared), "own": self._own.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.var, self.count = self._loaded(state)
        if self._own is None:
            return
        self.track_own()
        # A checkpoint of one process, or of an earlier version, has the statistics that all share and no others.
        if "own" in state:
            self._shared = self._loaded(state["shared"])
            self._own.load_state_dict(state["own"])

    def _loaded(self, state: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, float]:
        return like(state["mean"], self.mean, "mean"), like(state["var"], self.var, "var"), float(state["count"])


def _as_tensors(mean: np.ndarray, var: np.ndarray, count: float) -> dict[str, Any]:
    return {"mean": torch.from_numpy(np.array(mean)), "var": torch.from_numpy(np.array(var)), "count": float(count)}


class ObservationNormalizer(Stateful):
    """Observations in units of their running standard deviation; integers and images are left as they are.

    Args:
        space: space of one observation.
        clip: bound on the result, in standard deviations.

    Raises:
        UsageError: the space has no float Box to normalise.
    """

    running: Any = persistent()

    def __init__(self, space: spaces.Space, clip: float = 10.0) -> None:
        self.clip = clip
        self.running = self._build(space)
        if all(leaf is None for leaf in tree_leaves(self.running)):
            raise UsageError(f"norm_obs: the observation space {space} has no real numbers to normalise; images are "
                             "scaled by their bounds without it, so leave norm_obs out")  # fmt: skip

    def _build(self, space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            # Any number but 0 allows an action, so a whitened mask would allow all.
            return {name: None if name == MASK else self._build(part) for name, part in space.items()}
        if isinstance(space, spaces.Tuple):
            return {str(i): self._build(part) for i, part in enumerate(space)}
        # The encoder divides images by their bound, also those of floats: whitened ones would come out near 0.
        real = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and not is_image(space)
        return RunningMeanStd(space.shape) if real and space.shape is not None else None

    def parts(self) -> list[RunningMeanStd]:
        """Returns the statistics of every part of an observation that has some."""
        return [part for part in tree_leaves(self.running) if part is not None]

    def update(self, observation: Any) -> None:
        """Merges a batch of observations, [B, *obs]."""
        tree_map(lambda running, x: running and running.update(x), self.running, observation)

    def statistics(self) -> Any:
        """What :func:`rl_modules.common.spaces.normalize` takes, for each part of the observation."""
        return tree_map(lambda running: running and (running.mean, running.scale(), self.clip), self.running)

    def __call__(self, observation: Any) -> Any:
        return tree_map(normalize, observation, self.statistics())


class RewardNormalizer(Stateful):
    """Rewards divided by the running standard deviation of the discounted return; their mean stays.

    Args:
        n_envs: number of environments.
        gamma: discount of the return.
        clip: bound on the result.

    Source: the original PPO code's VecNormalize; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """

    running: RunningMeanStd = persistent(lambda self: RunningMeanStd(()))
    returns: np.ndarray = persistent(lambda self: np.zeros(self.n_envs, np.float64))

    def __init__(self, n_envs: int, gamma: float, clip: float = 10.0) -> None:
        self.n_envs = n_envs
        self.gamma = gamma
        self.clip = clip

    def parts(self) -> list[RunningMeanStd]:
        """Returns the statistics of the discounted return."""
        return [self.running]

    def __call__(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Merges a step's rewards, [N], and returns them scaled; the return restarts where ``done``."""
        self.returns = np.where(valid, self.returns * self.gamma + reward, self.returns)
        self.running.update(self.returns[valid])
        self.returns[done] = 0.0
        return np.clip(reward / self.running.scale(), -self.clip, self.clip)

    def add_recorded(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> None:
        """Merges the returns of recorded rewards, [T, N] each; those of the running episodes stay."""
        returns = np.zeros(reward.shape, np.float64)
        running = np.zeros(reward.shape[1], np.float64)
        for t in range(len(reward)):
            returns[t] = running = np.where(valid[t], running * self.gamma + reward[t], running)
            running = np.where(done[t], 0.0, running)
        self.running.update(returns[valid])

    def scaled(self, reward: np.ndarray) -> np.ndarray:
        """Rewards scaled by the current statistics, which stay as they are; any shape, float32."""
        return np.clip(reward / self.running.scale(), -self.clip, self.clip).astype(np.float32)
