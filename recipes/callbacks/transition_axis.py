"""One x-axis for every curve of a control run: environment transitions, whoever logs the point."""

from typing import Any

import lightning as L


def log_over_transitions(trainer: L.Trainer, datamodule: Any) -> None:
    """Makes the Trainer's loggers write at ``datamodule.num_timesteps`` what they are given at Lightning's own step.

    Lightning counts batches. ``LearningRateMonitor``, ``DeviceStatsMonitor`` and ``self.log`` pass that count to the
    loggers, beside the curves of the algorithm, which are drawn over transitions. A step that is neither None nor
    Lightning's count is kept.

    Args:
        trainer: its loggers are changed; call it before ``fit``.
        datamodule: counts transitions in ``num_timesteps``.
    """
    for logger in trainer.loggers:
        _redirect(logger, trainer, datamodule)


def _redirect(logger: Any, trainer: Any, datamodule: Any) -> None:
    write = logger.log_metrics

    def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
        is_lightnings = step is None or step == trainer.fit_loop.epoch_loop._batches_that_stepped
        write(metrics, step=datamodule.num_timesteps if is_lightnings else step)

    logger.log_metrics = log_metrics
