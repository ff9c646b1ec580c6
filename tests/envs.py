"""Environments with known answers, small enough to be solved in seconds; `tests.envs:make_...` as an env_id."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit


class Probe(gym.Env):
    """Episodes of ``length`` transitions over observations ±1 or 0, with a reward per transition.

    Source of the idea: A. Jones, "Debugging RL, without the agonizing pain" (probe environments).
    """

    def __init__(self, n_actions: int, random_observation: bool, length: int = 1) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(n_actions)
        self.random_observation = random_observation
        self.length = length
        self.t = 0
        self.observation = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        self.observation = np.zeros(1, np.float32)
        if self.random_observation:
            self.observation[:] = self.np_random.choice([-1.0, 1.0])
        return self.observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(self.reward(float(self.observation[0]), int(action)))
        self.t += 1
        self.observation = np.full(1, self.t, np.float32) if not self.random_observation else self.observation
        return self.observation, reward, self.t >= self.length, False, {}

    def reward(self, observation: float, action: int) -> float:
        raise NotImplementedError


class ConstantReward(Probe):
    """V = 1 everywhere."""

    def reward(self, observation: float, action: int) -> float:
        return 1.0


class ObservationValue(Probe):
    """V(s) = s."""

    def reward(self, observation: float, action: int) -> float:
        return observation


class TwoSteps(Probe):
    """Observation 0, then 1, then the reward 1: V(1) = 1, V(0) = γ."""

    def reward(self, observation: float, action: int) -> float:
        return observation


class ActionChoice(Probe):
    """Action 1 pays 1, action 0 costs 1."""

    def reward(self, observation: float, action: int) -> float:
        return 2.0 * action - 1.0


class ObservationTimesAction(Probe):
    """Action 1 is right where the observation is 1, action 0 where it is -1."""

    def reward(self, observation: float, action: int) -> float:
        return observation * (2.0 * action - 1.0)


class InfiniteHorizon(gym.Env):
    """Walks in a circle, with reward 1 for ever: V = 1 / (1 - γ), whatever a time limit around it says."""

    def __init__(self, n_states: int = 4) -> None:
        self.observation_space = spaces.Discrete(n_states)
        self.action_space = spaces.Discrete(2)
        self.n_states = n_states
        self.state = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.state = 0
        return self.state, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict]:
        self.state = (self.state + 1) % self.n_states
        return self.state, 1.0, False, False, {}


class Identity(gym.Env):
    """Reward 1 for the action that equals the observation; episodes of 100 transitions, cut by time.

    The task of Stable-Baselines3's ``common.envs.identity_env``, seeded, for any space of actions.
    """

    def __init__(self, space: spaces.Space, tolerance: float = 0.0, length: int = 100) -> None:
        self.observation_space = self.action_space = space
        self.tolerance = tolerance
        self.length = length
        self.t = 0
        self.target: Any = None

    def _draw(self) -> Any:
        if isinstance(self.observation_space, spaces.Box):
            low, high = self.observation_space.low, self.observation_space.high
            return self.np_random.uniform(low, high).astype(np.float32)
        if isinstance(self.observation_space, spaces.Discrete):
            return int(self.np_random.integers(self.observation_space.n))
        if isinstance(self.observation_space, spaces.MultiDiscrete):
            return self.np_random.integers(self.observation_space.nvec)
        return self.np_random.integers(2, size=self.observation_space.shape).astype(np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.t = 0
        self.target = self._draw()
        return self.target, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        reward = float(np.all(np.abs(np.asarray(action) - self.target) <= self.tolerance))
        self.target = self._draw()
        self.t += 1
        return self.target, reward, False, self.t >= self.length, {}


def make_constant_reward() -> gym.Env:
    return ConstantReward(n_actions=1, random_observation=False)


def make_observation_value() -> gym.Env:
    return ObservationValue(n_actions=1, random_observation=True)


def make_two_steps() -> gym.Env:
    return TwoSteps(n_actions=1, random_observation=False, length=2)


def make_action_choice() -> gym.Env:
    return ActionChoice(n_actions=2, random_observation=False)


def make_observation_times_action() -> gym.Env:
    return ObservationTimesAction(n_actions=2, random_observation=True)


def make_infinite_horizon(time_limit: int = 8) -> gym.Env:
    return TimeLimit(InfiniteHorizon(), time_limit)


def make_identity_discrete() -> gym.Env:
    return Identity(spaces.Discrete(4))


def make_identity_multidiscrete() -> gym.Env:
    return Identity(spaces.MultiDiscrete([4, 4]))


def make_identity_multibinary() -> gym.Env:
    return Identity(spaces.MultiBinary(4))


def make_identity_box() -> gym.Env:
    return Identity(spaces.Box(-1.0, 1.0, (1,), np.float32), tolerance=0.5)


class Coin(Probe):
    """Reward 1 or -1 with equal chances, whatever is done."""

    def reward(self, observation: float, action: int) -> float:
        return float(self.np_random.choice([-1.0, 1.0]))


def make_coin() -> gym.Env:
    return Coin(n_actions=2, random_observation=False)
