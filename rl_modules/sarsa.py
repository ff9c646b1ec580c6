"""SARSA and Expected SARSA with a table of action values."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_modules.common.masks import split_mask
from rl_modules.contract import Minibatch, Rollout
from rl_modules.core.settings import setting
from rl_modules.core.state import persistent
from rl_modules.tabular import TabularControl, rows


class SARSA(TabularControl):
    """SARSA: on-policy temporal-difference control, and Expected SARSA.

    Sutton & Barto 2018, section 6.4 (Rummery & Niranjan 1994) and section 6.6 (van Seijen et al. 2009):

        Q(s, a) ← Q(s, a) + α [r + γ Q(s', a') - Q(s, a)],   a' the action that is taken in s'
        Q(s, a) ← Q(s, a) + α [r + γ Σ_a' π(a'|s') Q(s', a') - Q(s, a)]                           with ``expected``

    The last transition of a rollout needs the first action of the next: it is sampled before the update and executed
    first in the next rollout. At a truncation a' is sampled but not executed.
    """

    expected: bool = setting(
        default=False,
        says="bootstrap from the expectation over the policy instead of one action, which reduces variance",
    )

    # Per environment the next state and the action that the last update drew for it; -1: none. On the CPU.
    _next_action: tuple[Tensor, Tensor] | None = persistent()

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns ε-greedy actions [N], or the action that the last update bootstrapped from where it is allowed."""
        here, mask = split_mask(observation)
        masks = () if mask is None else (mask,)  # a subclass may know none
        action = self.choose(here, generator, deterministic, *masks)
        # A different number of states means that this is not a step of the training environments.
        if self._next_action is not None and not deterministic and len(self._next_action[0]) == len(here):
            state, drawn = self._next_action
            taken = state == here.cpu()
            if mask is not None:  # another visit to the state may have allowed the drawn action
                taken &= mask.cpu().gather(1, drawn[:, None])[:, 0].bool()
            action = torch.where(taken, drawn, action)
            self._next_action = None
        return {"action": action.to(here.device)}

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        # The drawn actions are those of the training environments.
        kept, self._next_action = self._next_action, None
        try:
            return super().predict(observation, state, episode_start, deterministic, action_masks)
        finally:
            self._next_action = kept

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Returns the transitions with ``next_action`` (a'), [T, N]; -1 for a bootstrap from the expectation."""
        transitions = super().prepare(rollout)
        rollout = self.read_masks(rollout)
        if self.expected:
            return {**transitions, "next_action": torch.full_like(rollout["action"], -1)}
        successor = rollout["next_observation"].cpu()
        ends = (rollout["terminated"] | rollout["truncated"]).cpu()
        next_action = rollout["action"].cpu().roll(-1, 0)
        drawn = ends.clone()
        drawn[-1] = True
        next_action[drawn] = self.choose(successor[drawn], self._generator)
        self._next_action = torch.where(ends[-1], -1, successor[-1]), next_action[-1].clone()
        return {**transitions, "next_action": next_action.to(rollout["action"].device)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        errors = []
        names = ("observation", "action", "reward", "next_observation", "next_action", "terminated")
        for state, action, reward, successor, next_action, terminated in rows(batch, *names):
            target = reward if terminated else reward + self.gamma * self.next_value(successor, next_action)
            errors.append(self.move(state, action, target))
        self.finish_step(errors)

    # ---------------------------------------------------------------- pieces to override

    def next_value(self, state: int, action: int) -> float:
        """Returns the bootstrap value of the update: Q(s', a'), or its expectation over the policy."""
        return self.expected_value(state) if self.expected else float(self.tables.q[0, state, action])
