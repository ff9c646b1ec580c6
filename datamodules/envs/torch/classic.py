"""Gymnasium's classic control and the maze in torch: equations and constants are those of Gymnasium's files."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from datamodules.envs import maze
from datamodules.envs.torch.base import TorchEnv


def box(low: Any, high: Any) -> spaces.Box:
    """A Box of float32 vectors between bounds."""
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


def uniform(env: TorchEnv, low: list[float], high: list[float], generator: torch.Generator) -> Tensor:
    """States drawn between bounds, [N, len(low)]."""
    columns = [
        torch.rand(env.num_envs, generator=generator, dtype=env.dtype, device=env.device) * (b - a) + a
        for a, b in zip(low, high, strict=True)
    ]
    return torch.stack(columns, 1)


class CartPole(TorchEnv):
    """A pole on a cart that is pushed left (0) or right (1); the reward is 1 per step until the pole falls."""

    angle = 12 * 2 * math.pi / 360
    single_observation_space = box([-4.8, -np.inf, -2 * angle, -np.inf], [4.8, np.inf, 2 * angle, np.inf])
    single_action_space = spaces.Discrete(2)

    def initial(self, generator: torch.Generator) -> Tensor:
        shape = (self.num_envs, 4)
        return torch.rand(shape, generator=generator, dtype=self.dtype, device=self.device) * 0.1 - 0.05

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, speed, angle, spin = state.unbind(1)
        cos, sin = angle.cos(), angle.sin()
        force = torch.where(action == 1, 10.0, -10.0).to(state.dtype)
        push = (force + 0.05 * spin.square() * sin) / 1.1
        spins = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        speeds = push - 0.05 * spins * cos / 1.1
        # Euler's method, by which all four change with the speeds from before.
        following = state + 0.02 * torch.stack([speed, speeds, spin, spins], 1)
        terminated = (following[:, 0].abs() > 2.4) | (following[:, 2].abs() > self.angle)
        return following, torch.ones(self.num_envs, dtype=torch.float32, device=self.device), terminated


class Pendulum(TorchEnv):
    """A pendulum to be swung up by a torque; the reward is minus the squared distance from standing still upright."""

    single_observation_space = box([-1, -1, -8], [1, 1, 8])
    single_action_space = box([-2], [2])

    def initial(self, generator: torch.Generator) -> Tensor:
        return uniform(self, [-math.pi, -1.0], [math.pi, 1.0], generator)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, spin = state.unbind(1)
        torque = action[:, 0].to(state.dtype).clamp(-2.0, 2.0)
        from_top = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * spin.square() + 0.001 * torque.square()
        spin = (spin + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        never = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return torch.stack([angle + spin * 0.05, spin], 1), -cost.float(), never

    def observe(self, state: Tensor) -> Tensor:
        angle, spin = state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), spin], 1).float()


class MountainCar(TorchEnv):
    """A car too weak for its hill, pushed left (0), not (1) or right (2); the reward is -1 per step until the top."""

    max_speed, goal = 0.07, 0.5
    single_observation_space = box([-1.2, -0.07], [0.6, 0.07])
    single_action_space: spaces.Space = spaces.Discrete(3)

    def initial(self, generator: torch.Generator) -> Tensor:
        return uniform(self, [-0.6, 0.0], [-0.4, 0.0], generator)

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        following, terminated = self.drive(state, (action - 1).to(state.dtype) * 0.001)
        return following, torch.full((self.num_envs,), -1.0, dtype=torch.float32, device=self.device), terminated

    def drive(self, state: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next states, and whether the car has reached the goal."""
        place, speed = state.unbind(1)
        speed = (speed + push - 0.0025 * (3 * place).cos()).clamp(-self.max_speed, self.max_speed)
        place = (place + speed).clamp(-1.2, 0.6)
        speed = torch.where((place == -1.2) & (speed < 0), 0.0, speed)
        return torch.stack([place, speed], 1), (place >= self.goal) & (speed >= 0)


class MountainCarContinuous(MountainCar):
    """The same with a force in [-1, 1]; the reward is 100 at the top, minus a tenth of each squared force."""

    goal = 0.45
    single_action_space = box([-1], [1])

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        force = action[:, 0].to(state.dtype)
        following, terminated = self.drive(state, force.clamp(-1.0, 1.0) * 0.0015)
        # Gymnasium stores the state in single precision after every step.
        following = following.float().to(self.dtype)
        return following, (100.0 * terminated - 0.1 * force.square()).float(), terminated


class Maze(TorchEnv):
    """:class:`datamodules.envs.maze.Maze` as a table of its outcomes.

    Args:
        num_envs: N.
        max_episode_steps: steps after which an episode is truncated; None: never.
        device: where the states are.
        **arguments: of the maze: ``layout``, ``goal_reward`` and ``trap_reward``.
    """

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
        **arguments: Any,
    ) -> None:
        self.example = maze.Maze(**arguments)
        self.single_observation_space = self.example.observation_space
        self.single_action_space: spaces.Space = self.example.action_space
        super().__init__(num_envs, max_episode_steps, device)

    def to(self, device: torch.device | str) -> None:
        outcomes = [[choices[0] for choices in actions.values()] for actions in self.example.P.values()]
        #: Next state, reward and end of each state and action, [S, A].
        self.successor, self.reward, self.terminal = (
            torch.tensor([[outcome[i] for outcome in row] for row in outcomes], dtype=dtype, device=device)
            for i, dtype in ((1, torch.int64), (2, torch.float32), (3, torch.bool))
        )
        self.starts = torch.from_numpy(self.example.initial_state_distrib.nonzero()[0]).to(device)
        super().to(device)

    def initial(self, generator: torch.Generator) -> Tensor:
        drawn = torch.randint(len(self.starts), (self.num_envs,), generator=generator, device=self.device)
        return self.starts[drawn]

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.successor[state, action], self.reward[state, action], self.terminal[state, action]

    def observe(self, state: Tensor) -> Tensor:
        return state.clone()
