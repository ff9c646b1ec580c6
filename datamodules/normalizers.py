"""The normalisers of a run as one object."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_modules.common.spaces import tree_map

if TYPE_CHECKING:  # imported where something is normalised
    from datamodules.normalization import ObservationNormalizer, RewardNormalizer, RunningMeanStd


class Normalizers:
    """The normalisers of a run: of observations, of rewards, both or none.

    Args:
        of_observations: updated with every observation; None: observations stay as they are.
        of_rewards: updated with every reward; None: rewards stay as they are.
    """

    def __init__(
        self, of_observations: "ObservationNormalizer | None" = None, of_rewards: "RewardNormalizer | None" = None
    ) -> None:
        self.of_observations = of_observations
        self.of_rewards = of_rewards

    def observation(self, observation: Any) -> Any:
        """Observations in units of their running standard deviation, or as they are."""
        return observation if self.of_observations is None else self.of_observations(observation)

    def reward(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Returns a step's rewards, [N], scaled or as they are."""
        return reward if self.of_rewards is None else self.of_rewards(reward, done, valid)

    def sample(self, sample: dict[str, Any]) -> None:
        """Normalises replayed transitions by the current statistics, in place.

        Args:
            sample: CPU tensors: observation, next_observation [M, *obs] and reward [M, n], as the environments
                returned them.
        """
        if self.of_observations is not None:
            for name in ("observation", "next_observation"):
                arrays = self.of_observations(tree_map(lambda x: x.numpy(), sample[name]))
                sample[name] = tree_map(torch.from_numpy, arrays)
        if self.of_rewards is not None:
            sample["reward"] = torch.from_numpy(self.of_rewards.scaled(sample["reward"].numpy()))

    def add_recorded(self, rollout: dict[str, Any]) -> None:
        """Merges transitions that the environments of the run have not returned.

        Args:
            rollout: CPU tensors [T, N, …], of which observation, reward, terminated, truncated and valid are read; not
                normalised.
        """
        valid = rollout["valid"].numpy()
        if self.of_observations is not None:
            self.of_observations.update(tree_map(lambda x: x.numpy()[valid], rollout["observation"]))
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

    def parts(self) -> "list[RunningMeanStd]":
        """All running statistics, in a fixed order."""
        return [part for normalizer in (self.of_observations, self.of_rewards) if normalizer
                for part in normalizer.parts()]  # fmt: skip

    def merge_ranks(self, gather: Callable[[np.ndarray], list[np.ndarray]]) -> None:
        """Gives every rank the statistics of the samples of all ranks.

        Args:
            gather: from this rank's flat array to the list of all ranks', in their order.
        """
        parts = self.parts()
        if not parts:
            return
        sizes = np.cumsum([len(part.own()) for part in parts])[:-1]
        everyone = [np.split(flat, sizes) for flat in gather(np.concatenate([part.own() for part in parts]))]
        for i, part in enumerate(parts):
            part.merge_ranks([split[i] for split in everyone])

    def state_dict(self) -> dict[str, Any] | None:
        """None where nothing is normalised."""
        if self.of_observations is None and self.of_rewards is None:
            return None
        return {
            "observation": None if self.of_observations is None else self.of_observations.state_dict(),
            "reward": None if self.of_rewards is None else self.of_rewards.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """The inverse of :meth:`state_dict`, for the parts that both have."""
        if state is None:
            return
        if self.of_observations is not None and state["observation"] is not None:
            self.of_observations.load_state_dict(state["observation"])
        if self.of_rewards is not None and state["reward"] is not None:
            self.of_rewards.load_state_dict(state["reward"])

    def warm_start(self, state: dict[str, Any]) -> None:
        """Takes the statistics of an earlier run; its running returns belong to its own environments."""
        if self.of_observations is not None and state["observation"] is not None:
            self.of_observations.load_state_dict(state["observation"])
        if self.of_rewards is not None and state["reward"] is not None:
            self.of_rewards.running.load_state_dict(state["reward"]["running"])
