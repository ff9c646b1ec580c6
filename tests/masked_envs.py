"""Environments that allow some of their actions only, and complain of the others; ``tests.masked_envs:make_...``."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

MASKED_SPACES = {
    "discrete": spaces.Discrete(6),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(4),
}


class Guarded(gym.Env):
    """Allows random options in each step, fails on any other, and pays 1 for the target among them.

    Args:
        space: of the actions.
        source: ``info``, ``method`` or ``observation``.
        length: transitions per episode, which a time limit ends.
    """

    def __init__(self, space: spaces.Space, source: str, length: int = 7) -> None:
        self.action_space = space
        self.source = source
        self.length = length
        self.sizes = {
            "Discrete": lambda: [space.n],
            "MultiDiscrete": lambda: list(space.nvec),  # type: ignore[attr-defined]
            "MultiBinary": lambda: [2] * space.n,
        }[type(space).__name__]()  # type: ignore[attr-defined]
        state = spaces.Box(0.0, 1.0, (int(sum(self.sizes)),), np.float32)
        self.observation_space: spaces.Space = state
        if source == "observation":
            mask = spaces.MultiBinary(int(sum(self.sizes)))
            self.observation_space = spaces.Dict({"observation": state, "action_mask": mask})
        self.t = 0
        self.mask = np.ones(int(sum(self.sizes)), bool)
        self.target = np.zeros(len(self.sizes), np.int64)

    def _draw(self) -> tuple[Any, dict[str, Any]]:
        self.mask = self.np_random.random(int(sum(self.sizes))) < 0.5
        for k, size in enumerate(self.sizes):
            self.target[k] = self.np_random.integers(size)
            self.mask[sum(self.sizes[:k]) + self.target[k]] = True
        seen = np.zeros(len(self.mask), np.float32)
        for k in range(len(self.sizes)):
            seen[sum(self.sizes[:k]) + self.target[k]] = 1.0
        if self.source == "observation":
            return {"observation": seen, "action_mask": self.mask.astype(np.int8)}, {}
        return seen, {"action_mask": self.mask.astype(np.int8)} if self.source == "info" else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._draw()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        for k, choice in enumerate(np.ravel(action)):
            if not self.mask[sum(self.sizes[:k]) + int(choice)]:
                raise ValueError(f"the action {action} is forbidden")
        reward = float(np.array_equal(np.ravel(action), self.target))
        self.t += 1
        observation, info = self._draw()
        return observation, reward, False, self.t >= self.length, info


class GuardedWithMethod(Guarded):
    """The same with sb3-contrib's method."""

    def action_masks(self) -> list[bool]:
        return self.mask.tolist()


def make_guarded(space: str = "discrete", source: str = "info") -> gym.Env:
    return (GuardedWithMethod if source == "method" else Guarded)(MASKED_SPACES[space], source)


class Corridor(gym.Env):
    """Cells 0 to 5; at the walls one direction is forbidden. Goal 5; every step costs 1."""

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(6)
        self.action_space = spaces.Discrete(3)  # left, right, and one that is never allowed
        self.cell = 0

    def _mask(self) -> np.ndarray:
        return np.array([self.cell > 0, self.cell < 5, 0], np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(5))
        return self.cell, {"action_mask": self._mask()}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict]:
        if not self._mask()[int(action)]:
            raise ValueError(f"the action {action} is forbidden in cell {self.cell}")
        self.cell += 1 if action == 1 else -1
        return self.cell, -1.0, self.cell == 5, False, {"action_mask": self._mask()}


def make_corridor() -> gym.Env:
    return gym.wrappers.TimeLimit(Corridor(), 30)


class DeadEnd(gym.Env):
    """Allows no action after three steps, and goes on."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {"action_mask": np.ones(2, np.int8)}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, False, {"action_mask": np.full(2, self.t < 3, np.int8)}


class Remember(gym.Env):
    """Shows a cue in the first step and asks for it in the last; with ``masked``, the right answer's number moves.

    Four steps: the cue (one of two), two blanks, the question. Reward 1 for the answer that equals the cue. With
    ``masked`` the answers are the actions 0 and 1 or 2 and 3, by turns of chance, and the others are forbidden.
    """

    def __init__(self, masked: bool = False) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.masked = masked
        self.action_space = spaces.Discrete(4 if masked else 2)
        self.cue = self.t = self.offset = 0

    def _see(self) -> tuple[np.ndarray, dict[str, Any]]:
        seen = np.array([2.0 * self.cue - 1.0 if self.t == 0 else 0.0, float(self.t == 3)], np.float32)
        if not self.masked:
            return seen, {}
        mask = np.zeros(4, np.int8)
        mask[self.offset : self.offset + 2] = 1
        return seen, {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        self.cue = int(self.np_random.integers(2))
        self.offset = 2 * int(self.np_random.integers(2)) if self.masked else 0
        return self._see()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        answer = int(action) - self.offset
        if answer not in (0, 1):
            raise ValueError(f"the action {action} is forbidden")
        reward = float(self.t == 3 and answer == self.cue)
        self.t += 1
        if self.masked:
            self.offset = 2 * int(self.np_random.integers(2))
        observation, info = self._see()
        return observation, reward, self.t == 4, False, info


def make_remember(masked: bool = False) -> gym.Env:
    return Remember(masked)
