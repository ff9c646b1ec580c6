"""Running statistics of observations and returns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers.utils import update_mean_var_count_from_moments as merged

from rl_modules.common.errors import UsageError
from rl_modules.common.masks import MASK
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.common.spaces import is_image, normalize
from rl_modules.core.state import Stateful, persistent


class RunningMeanStd(Stateful):
    """Mean and variance of everything seen so far, merged batch by batch in float64; ``epsilon`` is the weight of the
    prior (mean 0, variance 1), as in SB3 and Gymnasium.

    Source: Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    mean: np.ndarray = persistent(lambda self: np.zeros(self.shape, np.float64))
    var: np.ndarray = persistent(lambda self: np.ones(self.shape, np.float64))
    count: float = persistent(lambda self: self.epsilon)
    # With several ranks: the shared statistics, and those of this rank's samples since.
    _shared: tuple[np.ndarray, np.ndarray, float] | None = persistent()
    _own: "RunningMeanStd | None" = persistent()

    def __init__(self, shape: tuple[int, ...], epsilon: float = 1e-4) -> None:
        self.shape, self.epsilon = shape, epsilon

    def update(self, batch: np.ndarray) -> None:
        """Merges a batch, [B, *shape]."""
        if len(batch):
            batch = batch.astype(np.float64)
            self.merge(batch.mean(0), batch.var(0), len(batch))

    def merge(self, mean: np.ndarray, var: np.ndarray, count: float) -> None:
        """Merges ``count`` samples of this mean and (biased) variance, [*shape] each."""
        if count == 0:
            return
        if self._own is not None:
            self._own.merge(mean, var, count)
        self.mean, self.var, self.count = merged(self.mean, self.var, self.count, mean, var, count)

    def scale(self) -> np.ndarray:
        """Standard deviation, kept away from 0."""
        return np.sqrt(self.var + 1e-8)

    # ---------------------------------------------------------------- several ranks

    def track_own(self) -> None:
        """Starts to track this rank's samples separately; all ranks have the same statistics at this time."""
        self._shared = (self.mean, self.var, self.count)
        self._own = RunningMeanStd(self.shape, epsilon=0.0)

    def own(self) -> np.ndarray:
        """Mean, variance and count of what this rank has seen since :meth:`track_own`, flat."""
        assert self._own is not None
        return np.concatenate([self._own.mean.ravel(), self._own.var.ravel(), [self._own.count]])

    def merge_ranks(self, parts: list[np.ndarray]) -> None:
        """Merges every rank's :meth:`own` into the shared statistics, in the same order on each rank."""
        assert self._shared is not None
        (self.mean, self.var, self.count), self._own = self._shared, None
        for part in parts:
            mean, var = (x.reshape(self.shape) for x in np.split(part[:-1], 2))
            self.merge(mean, var, float(part[-1]))
        self.track_own()

    def take(self, saved: dict[str, Any]) -> None:
        """Takes the statistics of an earlier run."""
        self.load_state_dict({name: saved[name] for name in ("mean", "var", "count")})
        if self._own is not None:
            self.track_own()


class ObservationNormalizer(Stateful):
    """Observations in units of their running standard deviation, bounded by ``clip``; integers and images stay."""

    running: Any = persistent(lambda self: _statistics_of(self.space))

    def __init__(self, space: spaces.Space, clip: float = 10.0) -> None:
        self.space, self.clip = space, clip
        if not self.parts():
            raise UsageError(
                f"norm_obs: the observation space {space} has no real numbers to normalise; images are "
                "scaled by their bounds without it, so leave norm_obs out"
            )

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


def _statistics_of(space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict):
        # Any number but 0 allows an action, so a whitened mask would allow all.
        return {name: None if name == MASK else _statistics_of(part) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): _statistics_of(part) for i, part in enumerate(space)}
    # The encoder divides images by their bound, also those of floats: whitened ones would come out near 0.
    is_real = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and not is_image(space)
    return RunningMeanStd(space.shape or ()) if is_real else None


class RewardNormalizer(Stateful):
    """Rewards divided by the running standard deviation of the return discounted by ``gamma``, bounded by ``clip``;
    their mean stays.

    Source: the original PPO code's VecNormalize; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """

    running: RunningMeanStd = persistent(lambda self: RunningMeanStd(()))
    returns: np.ndarray = persistent(lambda self: np.zeros(self.n_envs, np.float64))

    def __init__(self, n_envs: int, gamma: float, clip: float = 10.0) -> None:
        self.n_envs, self.gamma, self.clip = n_envs, gamma, clip

    def __call__(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Merges a step's rewards, [N], and returns them scaled; the return restarts where ``done``."""
        self.returns = np.where(valid, self.returns * self.gamma + reward, self.returns)
        self.running.update(self.returns[valid])
        self.returns[done] = 0.0
        return self.scaled(reward)

    def add_recorded(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> None:
        """Merges the returns of recorded rewards, [T, N] each; those of the running episodes stay."""
        returns = np.zeros(reward.shape, np.float64)
        running = np.zeros(reward.shape[1], np.float64)
        for t in range(len(reward)):
            returns[t] = running = np.where(valid[t], running * self.gamma + reward[t], running)
            running = np.where(done[t], 0.0, running)
        self.running.update(returns[valid])

    def scaled(self, reward: np.ndarray) -> np.ndarray:
        """Rewards scaled by the current statistics, which stay as they are; any shape."""
        return np.clip(reward / self.running.scale(), -self.clip, self.clip)


class Normalizers(Stateful):
    """The normalisers of a run, updated with every observation and reward; None: these stay as they are."""

    def __init__(
        self, of_observations: ObservationNormalizer | None = None, of_rewards: RewardNormalizer | None = None
    ) -> None:
        self.of_observations, self.of_rewards = of_observations, of_rewards

    def see(self, observation: Any) -> None:
        """Merges a batch of observations, [B, *obs], where they are normalised."""
        if self.of_observations is not None:
            self.of_observations.update(observation)

    def observation(self, observation: Any) -> Any:
        """Observations in units of their running standard deviation, or as they are."""
        return observation if self.of_observations is None else self.of_observations(observation)

    def reward(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Returns a step's rewards, [N], scaled or as they are."""
        return reward if self.of_rewards is None else self.of_rewards(reward, done, valid)

    def sample(self, sample: dict[str, Any]) -> None:
        """Normalises replayed transitions, [M, …], by the current statistics, in place."""
        if self.of_observations is not None:
            for name in ("observation", "next_observation"):
                arrays = self.of_observations(tree_map(lambda x: x.numpy(), sample[name]))
                sample[name] = tree_map(torch.from_numpy, arrays)
        if self.of_rewards is not None:
            scaled = self.of_rewards.scaled(sample["reward"].numpy()).astype(np.float32)
            sample["reward"] = torch.from_numpy(scaled)

    def add_recorded(self, rollout: dict[str, Any]) -> None:
        """Merges a rollout, [T, N, …] and not normalised, that the environments of the run have not returned."""
        valid = rollout["valid"].numpy()
        self.see(tree_map(lambda x: x.numpy()[valid], rollout["observation"]))
        if self.of_rewards is not None:
            done = (rollout["terminated"] | rollout["truncated"]).numpy()
            self.of_rewards.add_recorded(rollout["reward"].double().numpy(), done, valid)

    def forget(self, which: np.ndarray) -> None:
        """Begins new episodes in the environments chosen by a mask, [N]."""
        if self.of_rewards is not None:
            self.of_rewards.returns[which] = 0.0

    def statistics(self) -> Any:
        """What :func:`rl_modules.common.spaces.normalize` takes; None where observations stay as they are."""
        return None if self.of_observations is None else self.of_observations.statistics()

    def parts(self) -> list[RunningMeanStd]:
        """All running statistics, in a fixed order."""
        of_observations = [] if self.of_observations is None else self.of_observations.parts()
        return of_observations if self.of_rewards is None else [*of_observations, self.of_rewards.running]

    def merge_ranks(self, gather: Callable[[np.ndarray], list[np.ndarray]]) -> None:
        """Gives every rank the statistics of all samples; ``gather`` returns every rank's flat array, in order."""
        parts = self.parts()
        own = [part.own() for part in parts]
        sizes = np.cumsum([len(flat) for flat in own])[:-1]
        everyone = [np.split(flat, sizes) for flat in gather(np.concatenate(own))]
        for i, part in enumerate(parts):
            part.merge_ranks([split[i] for split in everyone])

    def state_dict(self) -> dict[str, Any]:
        by_name = {"observation": self.of_observations, "reward": self.of_rewards}
        return {name: None if part is None else part.state_dict() for name, part in by_name.items()}

    def load_state_dict(self, state: dict[str, Any] | None, device: Any = "cpu") -> None:
        """The inverse of :meth:`state_dict`, for the parts that both have."""
        for name, part in (("observation", self.of_observations), ("reward", self.of_rewards)):
            if state is not None and part is not None and state[name] is not None:
                part.load_state_dict(state[name])

    def warm_start(self, state: dict[str, Any]) -> None:
        """Takes the statistics of an earlier run; its running returns belong to its own environments."""
        if self.of_observations is not None and state["observation"] is not None:
            saved = state["observation"]["running"]
            tree_map(lambda part, earlier: part and part.take(earlier), self.of_observations.running, saved)
        if self.of_rewards is not None and state["reward"] is not None:
            self.of_rewards.running.take(state["reward"]["running"])
