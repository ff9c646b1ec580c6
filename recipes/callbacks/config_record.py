"""The resolved config of a run, as a file and in TensorBoard's TEXT tab."""

import re
from enum import Enum
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from recipes.callbacks.curves import log_folder


class ConfigRecord(SaveConfigCallback):
    """Writes the resolved config into the folder of a training run, and into TensorBoard as text.

    The config is not written for evaluations and for runs without a separate folder, because the file would replace a
    user's ``config.yaml``. A resumed run has the text already; it replaces the file only when training starts, because
    until then its checkpoint may refuse the new settings.
    """

    #: Whether the run has a folder to itself without a logger.
    has_folder = False
    #: Whether the run resumes in a folder that holds the config.
    resumes = False

    def __init__(self, parser: Any, config: Any, **arguments: Any) -> None:
        # A run started from the recorded config is a new run, so the record names no checkpoint.
        recorded = config.clone()
        for name, value in (("ckpt_path", None), ("resume", False)):
            if name in recorded:
                recorded[name] = value
        recorded.pop("weights_only", None)  # always true
        loggers = recorded["trainer"]["logger"]
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            settings = getattr(logger, "init_args", {})
            if re.fullmatch(r"version_\d+", str(settings.get("version"))):
                settings["version"] = None  # the number of the folder that is resumed
        super().__init__(parser, _without_enums(recorded), **arguments, save_to_log_dir=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self.resumes:
            super().setup(trainer, pl_module, stage)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.resumes and not self.already_saved:
            super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or not (trainer.loggers or self.has_folder):
            return
        folder = log_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, str(folder / self.config_filename), skip_none=False, overwrite=True)
        if self.resumes:
            return
        text = self.parser.dump(self.config)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))


def _without_enums(node: Any) -> Any:
    """A config with the values of enumerations, such as Timer's default ``Interval.step``, which YAML can't hold."""
    if isinstance(node, Enum):
        return node.value
    if isinstance(node, Namespace):
        return Namespace({key: _without_enums(value) for key, value in vars(node).items()})
    if isinstance(node, dict):
        return {key: _without_enums(value) for key, value in node.items()}
    return [_without_enums(value) for value in node] if isinstance(node, list) else node
