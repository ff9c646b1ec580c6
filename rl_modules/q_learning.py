"""Q-learning and Double Q-learning with tables of action values."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_modules.tabular import TabularControl, rows


class QLearning(TabularControl):
    """Q-learning: off-policy temporal-difference control, and Double Q-learning.

    Sutton & Barto 2018, section 6.5 (Watkins 1989) and section 6.7 (van Hasselt 2010):

        Q(s, a) ← Q(s, a) + α [r + γ max_a' Q(s', a') - Q(s, a)]
        Q₁(s, a) ← Q₁(s, a) + α [r + γ Q₂(s', argmax_a' Q₁(s', a')) - Q₁(s, a)]                    with ``double``

    With ``double`` a fair coin selects the table to update, and actions are chosen by the mean of both tables.

    Args:
        double: two tables, each evaluating the other's best action, which removes the upward bias of the maximum.
        gamma: discount γ per transition, in [0, 1].
        learning_rate: step size α, in (0, 1]; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0 over
            ``total_timesteps``, points such as ``0:0.5, 1:0.1``, ``1/n`` for the mean of all targets of an entry, or
            ``1/n^<w>`` with w in (½, 1), which weights recent targets more.
        exploration_fraction: share of training over which ε falls, in [0, 1].
        exploration_initial_eps: ε at the start, in [0, 1]; ε is the probability of a uniformly random action.
        exploration_final_eps: final ε, in [0, 1]; equal to the initial one: constant ε.
        initial_value: initial value of all entries, in units of return; optimistic values cause exploration.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose table a ``fit`` starts from; None: a new table.
    """

    def __init__(
        self,
        double: bool = False,
        gamma: float = 0.99,
        learning_rate: float | str = 0.1,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        initial_value: float = 0.0,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(
            gamma,
            learning_rate,
            exploration_fraction,
            exploration_initial_eps,
            exploration_final_eps,
            initial_value,
            log_every,
            observation_space,
            action_space,
            init_from,
        )
        self.uses_two_tables = double
        self.n_tables = 2 if double else 1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        errors = []
        coins = torch.rand(len(batch["reward"]), generator=self._generator) if self.uses_two_tables else None
        names = ("observation", "action", "reward", "next_observation", "terminated")
        for i, (state, action, reward, successor, terminated) in enumerate(rows(batch, *names)):
            table = 0 if coins is None else int(coins[i] < 0.5)
            target = reward if terminated else reward + self.gamma * self.next_value(successor, table)
            errors.append(self.move(state, action, target, table))
        self.finish_step(errors)

    # ---------------------------------------------------------------- pieces to override

    def next_value(self, state: int, table: int) -> float:
        """Returns the bootstrap value of ``table``'s update: max_a' Q(s', a'), or with ``double`` the other table's
        value of that action.
        """
        q = self.values(state)
        if not self.uses_two_tables:
            return float(q[0].max())
        best = np.flatnonzero(q[table] == q[table].max())
        if len(best) > 1:
            best = best[torch.randint(len(best), (1,), generator=self._generator).numpy()]
        return float(q[1 - table, best[0]])
