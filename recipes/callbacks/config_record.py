"""The resolved config of a run, in TensorBoard's TEXT tab, and the layout of its curves."""

from typing import Any

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from recipes.callbacks.layout import layout_of


class ConfigRecord(SaveConfigCallback):
    """Writes the resolved config into TensorBoard as text. A resumed run has it already and does not write it again."""

    #: Whether the run resumes in a folder that holds the config.
    resumes = False

    def __init__(self, parser: Any, config: Any, **arguments: Any) -> None:
        # A run started from the recorded config is a new run, so the record names no checkpoint.
        recorded = config.clone()
        for name, value in (("ckpt_path", None), ("resume", False)):
            if name in recorded:
                recorded[name] = value
        super().__init__(parser, recorded, **arguments)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or self.resumes:
            return
        text = self.parser.dump(self.config)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(layout_of(pl_module))
                logger.experiment.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))
