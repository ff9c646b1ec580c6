"""The maze in torch."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from datamodules.envs import maze
from datamodules.envs.torch.base import TorchEnv


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
