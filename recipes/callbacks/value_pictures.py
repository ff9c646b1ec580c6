"""Pictures of a tabular agent's values before and after training."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from PIL import Image

from recipes.callbacks.log_folder import log_folder
from recipes.grid_pictures import draw_values


class ValuePictures(Callback):
    """Writes ``values_before.png`` and ``values_after.png`` into the run's folder, and both to TensorBoard.

    It supports tabular agents on grid worlds (Maze, FrozenLake, CliffWalking), and warns otherwise.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.datamodule.num_timesteps == 0:  # type: ignore[attr-defined]
            self._draw(trainer, pl_module, "before")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer, pl_module, "after")

    @rank_zero_only
    def _draw(self, trainer: L.Trainer, pl_module: Any, when: str) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        model = datamodule.transition_model()
        name = type(pl_module).__name__
        if model is None or model.cells is None or not hasattr(pl_module, "greedy_policy"):
            rank_zero_warn(
                f"ValuePictures draws tables of grid worlds; {name} on {datamodule.env_name} gets no picture"
            )
            return
        achieved, best = model.expected_return(pl_module.greedy_policy()), model.optimal_return()
        title = (f"{name} on {datamodule.env_name}", f"{datamodule.num_timesteps:,} transitions",
                 f"greedy return {achieved:.4g} (best {best:.4g})")  # fmt: skip
        image = draw_values(pl_module.allowed_q, model, title)
        folder = log_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"values_{when}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("values", image, datamodule.num_timesteps, dataformats="HWC")
