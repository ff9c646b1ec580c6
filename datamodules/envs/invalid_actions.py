"""A task with many actions, of which each state allows a few."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class InvalidActions(gym.Env):
    """Gives reward 1 for the action that equals the observed number; each step forbids most of the other actions.

    The task of sb3-contrib's ``InvalidActionEnvDiscrete``, drawn from a private generator.

    Args:
        dim: number of actions.
        n_invalid_actions: how many of them each step forbids.
        ep_length: transitions per episode.
    """

    def __init__(self, dim: int = 70, n_invalid_actions: int = 55, ep_length: int = 100) -> None:
        self.observation_space = self.action_space = spaces.Discrete(dim)
        self.n_invalid_actions = n_invalid_actions
        self.ep_length = ep_length
        self.t = 0
        self.target = 0
        self.mask = np.ones(dim, bool)

    def action_masks(self) -> np.ndarray:
        """True where an action is allowed, [dim]."""
        return self.mask

    def _draw(self) -> int:
        dim = len(self.mask)
        self.target = int(self.np_random.integers(dim))
        others = np.delete(np.arange(dim), self.target)
        self.mask = np.ones(dim, bool)
        self.mask[self.np_random.choice(others, self.n_invalid_actions, replace=False)] = False
        return self.target

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict]:
        reward = float(action == self.target)
        self.t += 1
        return self._draw(), reward, False, self.t >= self.ep_length, {}
