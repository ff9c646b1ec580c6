"""Resuming under ``max_steps`` from the end of an epoch."""

from typing import Any


def begin_next_epoch(trainer: Any) -> None:
    """Lets a run that resumes from an epoch's end begin with the next epoch's first batch.

    Where ``max_steps`` is given, Lightning takes a finished epoch for an unfinished one. Unless an evaluation is due at
    its end, Lightning trains on one more batch in that epoch. With accumulated gradients, this batch alone makes an
    optimizer step.

    Args:
        trainer: whose training is about to start.
    """
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    is_finished = batches.restarted_on_last and batches.batch_progress.current.ready >= trainer.num_training_batches
    if not (is_finished and batches.restarting) or batches._should_check_val_fx(epochs._data_fetcher):
        return
    batches.restarting = False
    if epochs.restarted_on_epoch_end:  # as a callback saves in `on_train_epoch_end`
        epochs.epoch_progress.increment_completed()
        epochs.reset_restart_stage()
