"""The order of training records, the division of a pass into optimizer steps, and the times of evaluation."""

from typing import Any

import lightning as L
import torch

from datamodules.experience import evaluate_on_start
from datamodules.language.notices import notice
from rl_modules.common.seeding import stream_seed

#: Attribute of a Trainer with the ``val_check_interval`` that a datamodule has set from its ``eval_steps``.
_OWN_INTERVAL = "_interval_of_eval_steps"


class EndlessOrder:
    """Endless passes over records, each in an order that depends on the seed and the pass alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._passes: dict[int, torch.Tensor] = {}

    def at(self, position: int, n: int) -> int:
        """Which of ``n`` records stands at a position of the endless stream."""
        number, offset = divmod(position, n)
        order = self._passes.get(number)
        if order is None or len(order) != n:
            generator = torch.Generator().manual_seed(stream_seed(self._seed, 0, "order", number))
            order = torch.randperm(n, generator=generator)
            # Two passes may be in use at once, if a batch crosses the end of one. Rounds that are written ahead call
            # this in another thread, so the dictionary is replaced and never changed.
            self._passes = {k: v for k, v in self._passes.items() if k == number - 1} | {number: order}
        return int(order[offset])


def whole_steps(n: int, step: int) -> int:
    """Optimizer steps of ``step`` records in one pass over ``n``, at least 1."""
    return max(1, n // step)


def announce_rest(trainer: Any, n: int, step: int, fate: str) -> None:
    """Reports if a pass leaves out a tenth of the records or more, or repeats some in a step, in a run of epochs."""
    if (getattr(trainer, "max_epochs", None) or -1) <= 0:
        return
    rest = n - whole_steps(n, step) * step
    if rest < 0:
        notice(f"batch_size: a step of {step} records repeats the {n} that there are; give a smaller one")
    elif rest >= n / 10:
        notice(f"batch_size: of {n} records, {step} to an optimizer step, the last {rest} of a pass {fate}")


def evaluate_every(trainer: L.Trainer, steps: int, on_start: bool) -> None:
    """Makes a fit evaluate after every ``steps`` optimizer steps (0: never), and before the first update."""
    evaluate_on_start(trainer, on_start and steps > 0)
    # Lightning sets no number where the interval is a time.
    given = getattr(trainer, "val_check_interval", "a time")
    if given not in (1.0, getattr(trainer, _OWN_INTERVAL, None)) and not (steps and given == "a time"):
        notice(f"val_check_interval={given} of the Trainer has no effect: eval_steps={steps} is the number of "
               "optimizer steps between evaluations (0: none)")  # fmt: skip
    if steps:
        trainer.val_check_interval = steps * trainer.accumulate_grad_batches
        setattr(trainer, _OWN_INTERVAL, trainer.val_check_interval)
        trainer.check_val_every_n_epoch = None
