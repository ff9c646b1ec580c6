"""Replay of goals that were reached later: hindsight experience replay."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.buffers import Batch, ReplayBuffer
from datamodules.envs.boundary import largest
from datamodules.envs.vector import reset_once
from rl_modules.common.errors import UsageError
from rl_modules.core.state import persistent

#: Keys of an observation that has a goal, as in Gymnasium-Robotics.
GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")
STRATEGIES = ("future", "final", "episode")
#: Function of achieved and desired goals, [M, *goal] each, and M infos, which returns rewards, [M].
ComputeReward = Callable[[np.ndarray, np.ndarray, Sequence[dict[str, Any]]], Any]


class HindsightReplayBuffer(ReplayBuffer):
    """A replay buffer that replaces the goals of a share of its samples by goals that their episodes reached.

    A replaced goal is what the episode had achieved after a random later step, the transition's own among them
    (``future``), at its end (``final``), or after any of its steps (``episode``); the newest step of an episode that is
    still running counts as its end, and of an episode whose first steps were overwritten, only the remaining steps
    count. The reward is computed anew, and so is ``terminated`` where the environment has ``compute_terminated``;
    else it stays, as in Stable-Baselines3.

    Source: Andrychowicz et al. 2017, arXiv:1707.01495, section 3.3.
    """

    stores = (*ReplayBuffer.stores, "to_end", "position")
    #: Transitions of each running episode.
    length: np.ndarray = persistent(lambda self: np.zeros(self.n_envs, np.int64))
    #: Chooses transitions and goals.
    generator: torch.Generator = persistent(lambda self: torch.Generator().manual_seed(self.seed))

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        n_envs: int,
        buffer_size: int,
        compute_reward: ComputeReward,
        n_sampled_goal: int = 4,
        goal_selection_strategy: str = "future",
        seed: int = 0,
        double: bool = False,
        compute_terminated: ComputeReward | None = None,
    ) -> None:
        super().__init__(observation_space, action_space, n_envs, buffer_size, double)
        self.compute_reward, self.compute_terminated = compute_reward, compute_terminated
        goals: Any = observation_space
        #: The smallest goal if goals are discrete, because stored goals start at 0.
        self.start = getattr(goals["desired_goal"], "start", 0)
        self.share = n_sampled_goal / (n_sampled_goal + 1)
        self.strategy = goal_selection_strategy
        self.seed = seed
        #: Transitions of its episode after each transition; -1 while the episode runs.
        self.to_end = torch.from_numpy(np.full(self.total, -1, np.int64))
        #: Transitions of its episode before each transition.
        self.position = torch.from_numpy(np.zeros(self.total, np.int64))
        # Whether `compute_terminated` is not yet known to take one pair of goals only.
        self._takes_rows = True
        # Whether the rewards of the first sample were compared with those of `compute_reward`.
        self._is_compared = False

    def add(self, rollout: Batch) -> tuple[Tensor, Tensor]:
        """See :meth:`ReplayBuffer.add`."""
        transitions, blocked = super().add(rollout)
        self.to_end[transitions] = -1
        valid = rollout["valid"].numpy()
        row = np.zeros(valid.shape, np.int64)
        row[valid] = transitions.numpy() // self.n_envs
        count = valid.cumsum(0) + self.length
        done = valid & (rollout["terminated"] | rollout["truncated"]).numpy()
        at_ends = np.maximum.accumulate(np.where(done, count, 0))
        begun = np.concatenate([np.zeros_like(count[:1]), at_ends[:-1]])  # transitions of the episodes that ended
        self.position[transitions] = torch.from_numpy((count - 1 - begun)[valid])
        before = np.zeros_like(self.length)
        for t, i in zip(*np.nonzero(done), strict=True):
            self._close(int(i), int(row[t, i]), int(count[t, i] - before[i]))
            before[i] = count[t, i]
        self.length = count[-1] - before
        return transitions, blocked

    def break_off(self, which: np.ndarray) -> None:
        """See :meth:`ReplayBuffer.break_off`."""
        newest = (self.head.numpy() - 1) % self.rows
        for i in np.flatnonzero(which & (self.length > 0)):
            self._close(int(i), int(newest[i]), int(self.length[i]))
        self.length = np.where(which, 0, self.length)
        super().break_off(which)

    def _close(self, environment: int, row: int, length: int) -> None:
        """Notes where an episode ended."""
        # A ring shorter than the episode also holds rows after it.
        kept = (row - int(self.head[environment])) % self.rows
        steps = np.arange(min(length, kept))
        self.to_end.numpy()[(row - steps) % self.rows * self.n_envs + environment] = steps

    def gather(self, index: Tensor, n_steps: int = 1) -> Batch:
        """Transitions as :meth:`ReplayBuffer.gather` returns them, a share of them with other goals and rewards."""
        sample = super().gather(index, n_steps)
        if not self._is_compared:
            self._compare(sample)
        chosen = torch.rand(len(index), generator=self.generator) < self.share
        place = torch.rand(len(index), generator=self.generator, dtype=torch.float64)
        if not chosen.any():
            return sample
        given_goal = sample["observation"]["desired_goal"][chosen]
        goal = self.observation["achieved_goal"][self._reached(index[chosen], place[chosen])]
        for name in ("observation", "next_observation"):
            sample[name]["desired_goal"][chosen] = goal
        achieved = sample["next_observation"]["achieved_goal"][chosen]
        sample["reward"][chosen] = torch.from_numpy(self._rewards(achieved, goal))[:, None]
        if self.compute_terminated is not None:
            sample["terminated"][chosen] = self._ends(achieved, goal, given_goal, sample["terminated"][chosen])
        return sample

    def _ends(self, achieved: Tensor, goal: Tensor, given_goal: Tensor, terminated: Tensor) -> Tensor:
        """Whether transitions end their episodes under replaced goals, [M]; ends that no goal explains stay."""
        ends = torch.from_numpy(self._terminated(achieved, goal))
        if terminated.any():
            by_goal = self._terminated(achieved[terminated], given_goal[terminated])
            ends[terminated] |= ~torch.from_numpy(by_goal)
        return ends

    def _terminated(self, achieved: Tensor, desired: Tensor) -> np.ndarray:
        """``compute_terminated`` for goals as they are stored, [M, *goal] each; [M] bool."""
        compute: Any = self.compute_terminated

        def each(achieved: np.ndarray, desired: np.ndarray, infos: Sequence[dict[str, Any]]) -> Any:
            if self._takes_rows:
                with contextlib.suppress(Exception):
                    found = np.asarray(compute(achieved, desired, infos))
                    if found.shape == (len(desired),):
                        return found
                self._takes_rows = False  # as those of Gymnasium-Robotics: one pair of goals, one truth value
            return [bool(compute(*row)) for row in zip(achieved, desired, infos, strict=True)]

        return self._computed("compute_terminated", each, achieved, desired).astype(bool)

    def _rewards(self, achieved: Tensor, desired: Tensor) -> np.ndarray:
        """``compute_reward`` for goals as they are stored, [M, *goal] each; [M] float32."""
        return self._computed("compute_reward", self.compute_reward, achieved, desired)

    def _computed(self, name: str, compute: ComputeReward, achieved: Tensor, desired: Tensor) -> np.ndarray:
        """What a method of the environment returns for goals as they are stored, [M] float32."""
        infos: list[dict[str, Any]] = [{} for _ in range(len(desired))]
        pair = achieved.numpy() + self.start, desired.numpy() + self.start
        try:
            found = np.asarray(compute(*pair, infos), np.float32)
        except KeyError as error:
            said = f"reads {error} of info, and a buffer keeps no infos"
        else:
            if found.shape == (len(desired),) and (np.abs(found) <= largest(found.dtype)).all():
                return found
            of_shape = found.shape != (len(desired),)
            what = f"an array of shape {found.shape}" if of_shape else "a NaN, infinite or too large number"
            said = f"returned {what} for {len(desired)} goals"
        raise UsageError(
            f"the environment's {name} {said}; compute one finite number per goal from the two goals alone"
        )

    def _compare(self, sample: Batch) -> None:
        """Warns where the environment's own rewards are not those of ``compute_reward``, before goals are replaced."""
        self._is_compared = True
        after, given = sample["next_observation"], sample["reward"][:, 0].numpy()
        computed = self._rewards(after["achieved_goal"], after["desired_goal"])
        differs = ~np.isclose(given, computed, rtol=1e-3, atol=1e-4)
        # Rewards with a threshold may differ between float32 and float64 in a few rows.
        if differs.mean() > 0.05:
            i = int(differs.argmax())
            rank_zero_warn(
                f"compute_reward returns {computed[i]:g} for a transition that the environment rewarded by "
                f"{given[i]:g}, and {differs.mean():.0%} of the transitions have such differences: those "
                "with replaced goals learn from other rewards; have compute_reward follow what step and "
                "the wrappers do to goals and rewards"
            )

    def _reached(self, index: Tensor, place: Tensor) -> Tensor:
        """Rows whose achieved goals replace those of transitions, [M], at ``place`` in [0, 1) of the rest."""
        row, environment = index // self.n_envs, index % self.n_envs
        to_end = self.to_end[index]
        steps = torch.where(to_end >= 0, to_end, (self.head[environment] - 1 - row) % self.rows)
        if self.strategy == "episode":
            kept = (row - self.head[environment] - 1) % self.rows  # rows before it that were not overwritten
            before = torch.minimum(self.position[index], kept)
            steps = (place * (before + steps + 1)).long() - before
        elif self.strategy == "future":
            steps = (place * (steps + 1)).long()
        return (row + steps + 1) % self.rows * self.n_envs + environment

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """See :meth:`ReplayBuffer.load_state_dict`."""
        if "to_end" not in state:
            raise UsageError(
                "n_sampled_goal must be 0, for the checkpoint's buffer was filled without hindsight; "
                "resume with n_sampled_goal=0"
            )
        super().load_state_dict(state)
        if self.filled < self.rows:
            # A bounded checkpoint may lack the first rows of its oldest episodes.
            self.position = torch.minimum(self.position, torch.arange(self.total) // self.n_envs)
            self.length = np.minimum(self.length, self.head.numpy())


def check_hindsight(arguments: Any) -> None:
    """Refuses arguments of a replay datamodule that do not go together."""
    k = arguments["n_sampled_goal"]
    if k and arguments["n_steps"] != 1:
        raise UsageError(
            f"n_steps={arguments['n_steps']}: with n_sampled_goal={k} only the reward of one step is "
            "computed anew; set it to 1"
        )
    if k and arguments["share_frames"]:
        raise UsageError(f"share_frames=True can't go with n_sampled_goal={k}; leave one of them out")


def require_goals(
    observation_space: spaces.Space, env: Any, name: str, sign_reward: bool = False
) -> tuple[ComputeReward, Any]:
    """Returns the environment's ``compute_reward``, followed by what wrappers and ``sign_reward`` do to rewards, and
    its ``compute_terminated``; None: it has none.
    """
    keys = set(observation_space.spaces) if isinstance(observation_space, spaces.Dict) else set()
    if not keys.issuperset(GOAL_KEYS):
        raise UsageError(
            f"n_sampled_goal needs observations with goals, a Dict with the keys {', '.join(GOAL_KEYS)}; "
            f"{name} has {observation_space}"
        )
    if isinstance(env, gym.Env):  # a vector is reset by the training that steps it
        reset_once(env)
    # A wrapper that changes the goals has a compute_reward for them; one that changes the reward is outside of it.
    rescale: list[Callable[[Any], Any]] = []
    while isinstance(env, gym.Wrapper) and not hasattr(env, "compute_reward"):
        if isinstance(env, gym.wrappers.NormalizeReward):
            raise UsageError(
                "wrappers: NormalizeReward divides each reward by statistics of its own step, which the "
                "rewards of other goals can't follow; use norm_reward=True in its place"
            )
        if isinstance(env, gym.RewardWrapper):
            rescale.insert(0, np.vectorize(env.reward, [np.float32]))
        env = env.env
    compute: ComputeReward | None = getattr(env, "compute_reward", None)
    if compute is None:  # a vector's wrappers have none
        env = getattr(env, "unwrapped", env)
        compute = getattr(env, "compute_reward", None)
    if compute is None:
        raise UsageError(
            f"n_sampled_goal needs an environment with compute_reward(achieved_goal, desired_goal, info); "
            f"{name} has none"
        )
    if sign_reward:
        rescale.append(np.sign)

    def computed(achieved: np.ndarray, desired: np.ndarray, infos: Sequence[dict[str, Any]]) -> Any:
        reward = compute(achieved, desired, infos)
        for change in rescale:
            reward = change(np.asarray(reward))
        return reward

    return computed, getattr(env, "compute_terminated", None)
