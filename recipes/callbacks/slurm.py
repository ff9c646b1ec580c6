"""SLURM jobs that Lightning hands back to the queue."""

from pathlib import Path

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment


def requeue_signals(trainer: L.Trainer) -> tuple[int, ...]:
    """Returns the signal on which Lightning saves and requeues a SLURM job; none outside of such a job."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return (int(environment.requeue_signal),)
    return ()


def remove_requeue_checkpoints(trainer: L.Trainer) -> None:
    """Deletes the checkpoints that Lightning wrote for the queue; all ranks of a SLURM job call this.

    Lightning would load the newest of them even for the evaluation after training.
    """
    if not requeue_signals(trainer):
        return
    if trainer.is_global_zero:
        for path in Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"):
            path.unlink()
    trainer.strategy.barrier("hpc checkpoints removed")
