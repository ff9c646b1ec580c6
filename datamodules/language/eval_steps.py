"""Times of evaluation, counted in optimizer steps."""

import lightning as L

from datamodules.first_evaluation import evaluate_on_start
from datamodules.language.notices import notice

#: Attribute of a Trainer with the ``val_check_interval`` that a datamodule has set from its ``eval_steps``.
_OWN_INTERVAL = "_interval_of_eval_steps"


def evaluate_every(trainer: L.Trainer, steps: int, on_start: bool) -> None:
    """Makes a fit evaluate after every ``steps`` optimizer steps; Lightning itself counts micro-batches.

    Args:
        trainer: of the fit, which has not begun.
        steps: 0: no evaluation.
        on_start: evaluate before the first update too, where there are evaluations.
    """
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
