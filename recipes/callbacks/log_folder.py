"""The folder of a run's files, determined by one rank alone."""

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def log_folder(trainer: L.Trainer) -> Path:
    """Returns the run's own folder, in which its checkpoints are, for the first rank.

    ``Trainer.log_dir`` makes all ranks communicate, and with Weights & Biases it is the folder of all runs.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)
