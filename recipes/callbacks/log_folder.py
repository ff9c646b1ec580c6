"""Where a run's files are, asked by one rank alone."""

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def log_folder(trainer: L.Trainer) -> Path:
    """The folder of ``Trainer.log_dir``, for the first rank; the property itself has all ranks communicate.

    Args:
        trainer: of the run.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    folder = logger.log_dir if isinstance(logger, TensorBoardLogger | CSVLogger) else logger.save_dir
    return Path(folder or trainer.default_root_dir)
