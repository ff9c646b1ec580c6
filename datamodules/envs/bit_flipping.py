"""A task with goals that random actions hardly ever reach."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class BitFlipping(gym.Env):
    """Bits that are flipped one by one until they equal the goal; reward -1 for every step until then.

    The goal is drawn anew in each episode, and an episode has as many steps as there are bits: with 15 bits a random
    policy meets one goal in thousands.

    Args:
        n_bits: number of bits.

    Source: Andrychowicz et al. 2017, arXiv:1707.01495, section 3.1.
    """

    def __init__(self, n_bits: int = 15) -> None:
        bits = spaces.Box(0.0, 1.0, (n_bits,), np.float32)
        self.observation_space = spaces.Dict({"observation": bits, "achieved_goal": bits, "desired_goal": bits})
        self.action_space = spaces.Discrete(n_bits)
        self.bits = self.goal = np.zeros(n_bits, np.float32)
        self.t = 0

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """0 where all bits are those of the goal, else -1, [M] for goals [M, n_bits]."""
        return np.all(achieved_goal == desired_goal, axis=-1).astype(np.float32) - 1.0

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Whether all bits are those of the goal, [M] for goals [M, n_bits]."""
        return np.all(achieved_goal == desired_goal, axis=-1)

    def _observed(self) -> dict[str, np.ndarray]:
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(2, size=(2, len(self.bits))).astype(np.float32)
        self.t = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.bits[int(action)] = 1.0 - self.bits[int(action)]
        self.t += 1
        reward = float(self.compute_reward(self.bits, self.goal, {}))
        reached = reward == 0.0
        return self._observed(), reward, reached, self.t >= len(self.bits), {"is_success": reached}
