"""The evaluation before the first update."""

import lightning as L


def evaluate_on_start(trainer: L.Trainer, wanted: bool) -> None:
    """Makes a fit begin with a whole evaluation, or without one.

    The evaluation is Lightning's sanity check with all batches: it leaves the global generators as they were, and
    callbacks that save or stop ignore it. The modules' ``on_load_checkpoint`` turns it off for a run that resumes.

    Args:
        trainer: of the fit, which has not begun.
        wanted: evaluate before the first update.
    """
    tries = getattr(trainer, "fast_dev_run", False)
    trainer.num_sanity_val_steps = float("inf") if wanted and not tries else 0
