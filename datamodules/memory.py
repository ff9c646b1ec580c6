"""The recurrent state of a policy while it acts."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_modules.contract import Act
from rl_modules.core.state import Stateful, persistent


class Memory(Stateful):
    """One recurrent state per environment, kept between steps and rollouts, and reset with each episode."""

    #: State after the last action, [N, K, H]; None: no action was taken yet.
    state: Tensor | None = persistent()

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        # States after each action of the rollout, for the values of final observations.
        self._after: list[Tensor] = []

    def begin_rollout(self) -> None:
        """Forgets what only the last rollout needed."""
        self._after.clear()

    def act(
        self, act: Act, observation: Any, generator: torch.Generator, starts: np.ndarray | Tensor
    ) -> dict[str, Tensor]:
        """Calls ``act`` from the current state; adds ``state`` before it and ``episode_start``, [N, …]."""
        state, begins = self._current(starts)
        acted = dict(self._call(act, observation, generator, state))
        self.state = acted.pop("next_state")
        self._after.append(self.state)
        return {**acted, "state": state, "episode_start": begins}

    def value(
        self, act: Act, observation: Any, device: torch.device, starts: np.ndarray, ends: list[tuple[int, int]]
    ) -> Tensor:
        """V of the observations after a rollout, N newest and F final ones at ``ends``, [N + F]."""
        state = torch.cat([self._current(starts)[0], *(self._after[t][i][None] for t, i in ends)])
        return self._call(act, observation, torch.Generator(device), state)["value"]

    def _current(self, starts: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        fresh = self.learner.initial_state(len(starts))
        begins = torch.as_tensor(starts).clone().to(fresh.device)
        if self.state is None:
            return fresh, begins
        # A resumed run may compute in another precision than the checkpoint's.
        return torch.where(begins[:, None, None], fresh, self.state.to(fresh.dtype)), begins

    @staticmethod
    def _call(act: Any, observation: Any, generator: torch.Generator, state: Tensor) -> dict[str, Tensor]:
        return act(observation, generator, state=state)
