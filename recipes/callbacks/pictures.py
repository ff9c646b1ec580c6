"""Pictures of the values of a grid world, as a callback too."""

from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from datamodules.envs.model import TransitionModel
from recipes.callbacks.curves import log_folder

#: From low to high value: matplotlib's viridis, five anchors.
_COLORS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], float)
_CELL = 72
_OVERSAMPLING = 2


def draw_values(q: Tensor, model: TransitionModel, title: tuple[str, ...] = ()) -> np.ndarray:
    """Draws a heat map of max_a Q(s, a) with an arrow for every best action."""
    assert model.cells is not None
    rows, columns = len(model.cells), len(model.cells[0])
    scale = _CELL * _OVERSAMPLING
    top = round(scale * (0.1 + 0.26 * len(title)))
    width = max(columns * scale, round(scale * 0.125 * max((len(line) for line in title), default=0)))
    left = (width - columns * scale) // 2
    image = Image.new("RGB", (width, top + rows * scale), "white")
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(scale * 0.2), ImageFont.load_default(scale * 0.17)
    for i, line in enumerate(title):
        pen.text((left + scale * 0.05, scale * (0.05 + 0.26 * i)), line, "black", font)
    value = q.max(-1).values
    lives = model.acts_in()
    low, high = (float(value[lives].min()), float(value[lives].max())) if lives.any() else (0.0, 0.0)
    directions = action_directions(model)
    for s in range(model.states):
        row, column = divmod(s, columns)
        x, y = left + column * scale, top + row * scale
        letter = model.cells[row][column]
        shade = (float(value[s]) - low) / (high - low) if high > low else 0.5
        color = _color(shade) if lives[s] else (90, 90, 90) if letter in "#" else (225, 225, 225)
        pen.rectangle((x, y, x + scale - 1, y + scale - 1), color, "white", 2)
        ink = "black" if sum(color) > 330 else "white"
        if letter not in ".F#" or not lives[s]:
            pen.text((x + scale * 0.08, y + scale * 0.04), letter.strip("#"), ink, small)
        if lives[s]:
            pen.text((x + scale * 0.5, y + scale * 0.86), f"{float(value[s]):.3g}", ink, small, anchor="mm")
            for a in (q[s] == value[s]).nonzero()[:, 0].tolist():
                _arrow(pen, x + scale * 0.5, y + scale * 0.45, directions[a], scale * 0.26, ink)
    return np.asarray(image.reduce(_OVERSAMPLING))


def action_directions(model: TransitionModel) -> list[tuple[int, int]]:
    """Returns each action's mean move in a grid world as (rows, columns), whatever the environment's numbering."""
    assert model.cells is not None
    columns = len(model.cells[0])
    states = torch.arange(model.states)
    inner = model.transition[: model.states, :, : model.states]
    row_step = states[None, :] // columns - states[:, None] // columns
    column_step = states[None, :] % columns - states[:, None] % columns
    neighbour = (row_step.abs() + column_step.abs() == 1).double()
    directions = []
    for a in range(inner.shape[1]):
        weight = inner[:, a] * neighbour
        y, x = float((weight * row_step).sum()), float((weight * column_step).sum())
        if max(abs(y), abs(x)) < 1e-9:
            directions.append((0, 0))
        else:
            directions.append((int(np.sign(y)), 0) if abs(y) >= abs(x) else (0, int(np.sign(x))))
    return directions


def _color(shade: float) -> tuple[int, int, int]:
    position = min(max(shade, 0.0), 1.0) * (len(_COLORS) - 1)
    i = min(int(position), len(_COLORS) - 2)
    r, g, b = _COLORS[i] + (position - i) * (_COLORS[i + 1] - _COLORS[i])
    return round(r), round(g), round(b)


def _arrow(pen: Any, x: float, y: float, direction: tuple[int, int], length: float, ink: str) -> None:
    dy, dx = direction
    if not dx and not dy:
        pen.ellipse((x - length / 6, y - length / 6, x + length / 6, y + length / 6), ink)
        return
    tip = (x + dx * length, y + dy * length)
    neck = (x + dx * length * 0.5, y + dy * length * 0.5)
    half = length * 0.22
    pen.line((x, y, *neck), ink, max(2, round(length * 0.12)))
    pen.polygon((tip, (neck[0] - dy * half, neck[1] + dx * half), (neck[0] + dy * half, neck[1] - dx * half)), ink)


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
        title = (
            f"{name} on {datamodule.env_name}",
            f"{datamodule.num_timesteps:,} transitions",
            f"greedy return {achieved:.4g} (best {best:.4g})",
        )
        image = draw_values(pl_module.allowed_q, model, title)
        folder = log_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"values_{when}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("values", image, datamodule.num_timesteps, dataformats="HWC")
