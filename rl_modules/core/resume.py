"""Corrections of Lightning's loops, as of Lightning 2.6: a run resumes exactly, and an algorithm's own steps count.
``tests/rl_modules/core/test_lightning_faults.py`` shows each fault by a plain LightningModule, under the name of its
correction.
:mod:`rl_modules.core.hooks` has those that every fit needs.
"""

import sys
import warnings
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rl_modules.common.errors import UsageError
from rl_modules.core.checkpoint_file import check_optimizers
from rl_modules.core.hooks import is_cut_off

if TYPE_CHECKING:
    from rl_modules.algorithm import Algorithm


# ---------------------------------------------------------------- a run


def count_step(trainer: L.Trainer) -> None:
    """Counts a step for ``max_steps`` and checkpoints; Lightning's manual optimization counts its own optimizers'."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def uncount_step(trainer: L.Trainer) -> None:
    """Takes back a step of automatic optimization that was skipped, before Lightning counts it."""
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    for progress in (steps.total, steps.current):
        progress.ready -= 1
        progress.completed -= 1


def step_schedulers_of_updates(module: "Algorithm") -> None:
    """Steps the due schedulers with ``interval: step`` after an update, as automatic optimization does."""
    for config in module.trainer.lr_scheduler_configs:
        updates = module.trainer.fit_loop.epoch_loop.batch_idx + 1
        is_due = config.interval == "step" and updates % config.frequency == 0
        if is_due and not isinstance(config.scheduler, ReduceLROnPlateau):  # `step_schedulers` refuses it
            module.lr_scheduler_step(config.scheduler, None)


def step_schedulers_of_epochs(module: "Algorithm") -> None:
    """Steps the learning-rate schedulers of epochs after one, whose ``frequency`` divides the number of epochs."""
    for config in () if is_cut_off(module.trainer) else module.trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            raise UsageError(
                f"ReduceLROnPlateau needs a metric, and {type(module).__name__} optimizes manually: "
                "Lightning keeps no monitor then; override step_schedulers, which is called after "
                "every epoch, or take another scheduler"
            )
        # `current_epoch` is one higher if this completes the last epoch of a checkpoint.
        progress: Any = module.trainer.fit_loop.epoch_progress.current
        if config.interval == "epoch" and progress.processed % config.frequency == 0:
            module.lr_scheduler_step(config.scheduler, None)


# ---------------------------------------------------------------- what a checkpoint has


def keep_earlier_checkpoint(trainer: L.Trainer | None, has_begun: bool) -> None:
    """Raises the exception that ended a fit before its training: its checkpoint would overwrite an earlier run's."""
    error = sys.exc_info()[1]
    if error is not None and not has_begun and trainer is not None and trainer.interrupted:
        data: Any = getattr(trainer, "datamodule", None)
        if data is not None:  # which Lightning would tell after the callbacks
            data.on_exception(error)
        raise error


def accumulated_gradients(module: "Algorithm") -> dict[str, Tensor]:
    """Returns the gradients of an unfinished optimizer step by parameter, which Lightning's checkpoints lack."""
    if not module.is_fitting:
        return {}
    batches = module.trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if batches % module.trainer.accumulate_grad_batches == 0:
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def epoch_to_reopen(trainer: L.Trainer) -> int | None:
    """Returns the number, from 1, of the epoch that a stop cut off and Lightning counts as done; None: none is."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    # A run that resumed at an epoch's end counts fewer epochs as started.
    return int(epochs.processed) if batches.completed and epochs.processed >= epochs.started else None


def reopen_epoch(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Makes a run resume within the epoch that a stop cut off; Lightning counts it as done and begins another."""
    number = epoch_to_reopen(trainer)
    # The state that a rank returns to the process that started it has no loops, because no run resumes from it.
    if "loops" not in checkpoint or number is None:
        return
    for progress in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        progress.update(ready=number, started=number, processed=number - 1, completed=number - 1)
    checkpoint["epoch"] = number - 1


# ---------------------------------------------------------------- where a run resumes


def resume_training(module: "Algorithm") -> None:
    """Restores what Lightning does not load: gradients of an unfinished step, and moments."""
    check_optimizers(module.trainer.optimizers)
    for name, parameter in module.named_parameters():
        if name in module.run.gradients:
            parameter.grad = module.run.gradients[name].to(parameter.device, parameter.dtype)
    module.run.gradients = {}
    begin_next_epoch(module.trainer)


def finish_batch(trainer: L.Trainer) -> None:
    """Runs what is due after the batch at whose end the checkpoint was written: an evaluation, the epoch's end."""
    epochs: Any = trainer.fit_loop
    batches: Any = epochs.epoch_loop
    # Otherwise schedulers that wait for a metric would miss the end of the first epoch.
    epochs._restarting = False
    if not batches.restarted_on_train_batch_end:
        return
    ends_epoch = epochs.restarted_mid_epoch and batches.batch_progress.is_last_batch
    # The counts are those of an uninterrupted run at these places, for callbacks that read or save them.
    of_epochs, of_batches = (
        [progress.total, progress.current] for progress in (epochs.epoch_progress, batches.batch_progress)
    )
    for progress in of_batches:
        progress.completed += 1
    for progress in of_epochs if ends_epoch else ():
        progress.processed -= 1
        progress.completed -= 1
    batches.val_loop.restarting = False
    with warnings.catch_warnings():
        # The optimizer has stepped: before the checkpoint, which torch does not know.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        batches.on_advance_end(epochs._data_fetcher)
        if ends_epoch:
            epochs.on_advance_end()
            epochs.reset_restart_stage()  # else the next epoch would have no beginning
    # Lightning has yet to count the batch as completed and stepped.
    batches._batches_that_stepped -= not batches._should_accumulate()
    for progress in of_batches:
        progress.completed -= 1


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Lets a run that resumes from an epoch's end begin with the next epoch's first batch.

    Under ``max_steps`` Lightning takes the epoch for an unfinished one, and trains on one more batch in it.
    """
    epochs: Any = trainer.fit_loop
    batches: Any = epochs.epoch_loop
    is_finished = batches.restarted_on_last and batches.batch_progress.current.ready >= trainer.num_training_batches
    # Lightning counts a batch as stepped after its evaluation, in which a checkpoint may have been written.
    steps = trainer.global_step if trainer.lightning_module.automatic_optimization else batches.total_batch_idx + 1
    is_counted = batches.restarted_on_last and batches._batches_that_stepped >= steps
    if not (is_finished and batches.restarting):
        if is_counted:
            _skip_end_of_batch(batches)
        return
    epoch = epochs.epoch_progress.current
    # A completed epoch has been evaluated: the checkpoint was written after its fit.
    is_completed = epoch.completed == epoch.processed == epoch.started == epoch.ready
    if not is_completed and batches._should_check_val_fx(epochs._data_fetcher):
        if epochs.restarted_on_epoch_end:  # Lightning counts the epoch as processed again, after the evaluation
            for progress in (epochs.epoch_progress.total, epochs.epoch_progress.current):
                progress.processed -= 1
        batches._batches_that_stepped -= is_counted  # Lightning ends the batch again
        return
    batches.restarting = False
    if epochs.restarted_on_epoch_end:  # as a callback saves in `on_train_epoch_end`
        epochs.epoch_progress.increment_completed()
        epochs.reset_restart_stage()


def _skip_end_of_batch(batches: Any) -> None:
    """Lets a run that resumes between two batches begin with the next; Lightning would end the one before again."""

    def once(data_fetcher: Any) -> bool:
        del batches._should_check_val_fx
        return False

    batches._should_check_val_fx = once
