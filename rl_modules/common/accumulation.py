"""Accumulated gradients of an unfinished optimizer step, for a checkpoint between two of its micro-batches."""

from typing import Any

from torch import Tensor


def accumulated_gradients(module: Any) -> dict[str, Tensor]:
    """Returns this rank's gradients of an unfinished optimizer step by parameter; empty between two steps.

    Args:
        module: a LightningModule that a ``fit`` trains with automatic optimization.
    """
    trainer = module.trainer
    if trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0:
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
