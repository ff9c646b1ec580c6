"""Environments of the conformance suite; ``tests.conformance.envs:make_...`` as an env_id."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


def make_short_cartpole() -> gym.Env:
    """CartPole with another time limit: the same spaces, another environment."""
    return gym.make("CartPole-v1", max_episode_steps=20)


def make_short_pendulum() -> gym.Env:
    return gym.make("Pendulum-v1", max_episode_steps=20)


def make_short_maze() -> gym.Env:
    import datamodules  # noqa: F401

    return gym.make("Maze-v0", max_episode_steps=10)


class Guess(gym.Env):
    """Episodes of two steps, whose rewards are squared distances of the action from the observation."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = -float(np.square(action - self.seen).sum())
        self.t += 1
        return self._observe(), reward, self.t == 2, False, {}


def make_guess() -> gym.Env:
    return Guess()


def make_other_guess() -> gym.Env:
    return gym.wrappers.TimeLimit(Guess(), 1)


class Counting(VectorEnv):
    """A vector that somebody else made: N counters that end after five steps, in the next-step mode."""

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(-1.0, 10.0, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.count = np.zeros(num_envs, np.int64)
        self.over = np.zeros(num_envs, bool)

    def _observation(self) -> np.ndarray:
        return np.stack([self.count, np.arange(self.num_envs)], axis=1).astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.count[:] = 0
        self.over[:] = False
        return self._observation(), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        reward = np.where(self.over, 0.0, np.asarray(actions) + 1.0)
        self.count = np.where(self.over, 0, self.count + 1)
        self.over = self.count >= 5
        return self._observation(), reward, self.over.copy(), np.zeros(self.num_envs, bool), {}


def make_counting(num_envs: int = 3) -> Counting:
    return Counting(num_envs)


class Buffered(gym.Env):
    """Returns one array each time, which it overwrites."""

    observation_space = spaces.Box(-100.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.buffer = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.buffer[:] = 0.0
        return self.buffer, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.buffer += 1.0
        return self.buffer, 1.0, False, bool(self.buffer[0] >= 4), {}


class Endless(gym.Env):
    """An episode that never ends."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Drift(gym.Env):
    """Observations that grow within an episode, so that running statistics change with every step."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.at = 0.0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.at = float(self.np_random.normal())
        return np.array([self.at], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.at += 1.0 + float(self.np_random.random())
        return np.array([self.at], np.float32), 1.0, False, self.at > 6.0, {}
