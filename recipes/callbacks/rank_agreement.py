"""Makes all ranks decide alike when to save and when to stop; otherwise they would wait for each other."""

import time

import lightning as L
import torch

#: Seconds between two exchanges of the ranks.
AGREEMENT_INTERVAL_S = 0.25


class RankAgreement:
    """Takes the same decision on all ranks, about four times a second.

    The number of optimizer steps between two exchanges follows from rank 0's steps per second, so that all ranks
    exchange after the same step.
    """

    def __init__(self) -> None:
        self._steps, self._every, self._agreed_s = 0, 1, 0.0

    def decide(self, trainer: L.Trainer, stop: int, is_due: bool) -> tuple[int, bool]:
        """Returns the signal that any rank received, and whether rank 0 wants to save; called once per step."""
        if trainer.world_size == 1:
            return stop, is_due
        self._steps += 1
        if self._steps < self._every:
            return 0, False
        now = time.monotonic()
        rate = self._steps / max(now - self._agreed_s, 1e-6) if self._agreed_s else 0.0
        wishes = torch.tensor(
            [stop, is_due and trainer.is_global_zero, rate if trainer.is_global_zero else 0.0],
            device=trainer.strategy.root_device, dtype=torch.float32
        )  # fmt: skip
        torch.distributed.all_reduce(wishes, torch.distributed.ReduceOp.MAX)
        stop_any, due_any, rate = wishes.tolist()
        self._steps, self._agreed_s = 0, now
        self._every = max(1, min(1000, int(rate * AGREEMENT_INTERVAL_S)))
        return int(stop_any), bool(due_any)
