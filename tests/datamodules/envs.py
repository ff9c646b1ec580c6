"""Deterministic environments whose every transition is known."""

import os
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counter(gym.Env):
    """Counts steps from a seeded start; terminates or is truncated at fixed counts.

    Observation [start, count]; reward = count after the step. Episodes of even seed terminate after ``length`` steps,
    those of odd seed are truncated there.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 5, bad_at: int = -1, bad: str = "reward") -> None:
        self.length, self.bad_at, self.bad = length, bad_at, bad

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.even = seed is None or seed % 2 == 0
        self.start, self.count = float(self.np_random.integers(1000)), 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        reward = float("nan") if self.bad == "reward" and self.count == self.bad_at else float(self.count)
        return self._observe(), reward, over and self.even, over and not self.even, {}

    def _observe(self):
        broken = self.bad == "observation" and self.count == self.bad_at
        return np.array([self.start, np.nan if broken else self.count], np.float32)


class Forgetful(Counter):
    """Starts somewhere else at every reset, whatever the seed: no replay can bring an episode back."""

    starts = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Forgetful.starts += 1
        self.start = float(Forgetful.starts)
        return self._observe(), {}


class Suicidal(Counter):
    """Ends its own process at the third step."""

    def step(self, action):
        if self.count == 2:
            import os

            os._exit(7)
        return super().step(action)


class Odd(Counter):
    """Has an action space that no algorithm here can act in."""

    action_space = spaces.Sequence(spaces.Discrete(2))


class Unreliable(gym.Wrapper):
    """CartPole that fails in its ``at``-th step while a file exists: by an exception, or by the end of its process."""

    def __init__(self, file: str, at: int, how: str = "raises") -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.file, self.at, self.how, self.steps = Path(file), at, how, 0

    def step(self, action):
        self.steps += 1
        if self.steps == self.at and self.file.exists():
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the pole is gone")
        return super().step(action)
