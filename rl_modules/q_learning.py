"""Q-learning and Double Q-learning with tables of action values."""

import numpy as np
import torch
from torch import Tensor

from rl_modules.core.settings import setting
from rl_modules.tabular import TabularControl, rows


class QLearning(TabularControl):
    """Q-learning: off-policy temporal-difference control, and Double Q-learning.

    Sutton & Barto 2018, section 6.5 (Watkins 1989) and section 6.7 (van Hasselt 2010):

        Q(s, a) ← Q(s, a) + α [r + γ max_a' Q(s', a') - Q(s, a)]
        Q₁(s, a) ← Q₁(s, a) + α [r + γ Q₂(s', argmax_a' Q₁(s', a')) - Q₁(s, a)]                    with ``double``

    With ``double`` a fair coin selects the table to update, and actions are chosen by the mean of both tables.
    """

    uses_two_tables: bool = setting(
        alias="double",
        default=False,
        says="two tables, each evaluating the other's best action, which removes the upward bias of the maximum",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_tables = 2 if self.uses_two_tables else 1

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
