"""What the ladder's notebooks share: a quiet ``fit`` that returns the curves, and a plot."""

import logging
import warnings
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.loggers.logger import DummyLogger

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)

Curves = dict[str, list[tuple[int, float]]]


class Memory(DummyLogger):
    """Keeps the curves in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.curves: Curves = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Adds one point per metric."""
        for name, value in metrics.items():
            self.curves.setdefault(name, []).append((step or 0, float(value)))


def fit(model: L.LightningModule, data: L.LightningDataModule, **trainer: Any) -> Curves:
    """Trains on the CPU; returns every curve as (step, value)."""
    memory = Memory()
    L.Trainer(
        **{"max_epochs": -1, **trainer}, accelerator="cpu", logger=memory, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, datamodule=data)  # fmt: skip
    return memory.curves


def plot(curves: dict[str, Curves], metric: str, xlabel: str, ylabel: str, best: float | None = None) -> None:
    """Draws one metric of several runs."""
    _, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, run in curves.items():
        steps, values = zip(*run[metric], strict=True)
        axes.plot(steps, values, label=name, marker="." if len(steps) < 20 else None)
    if best is not None:
        axes.axhline(best, color="gray", linestyle="--", linewidth=1, label="best possible")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if len(curves) > 1 or best is not None:
        axes.legend()
    plt.show()


def show(picture: Any) -> None:
    """Draws pixels."""
    _, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    axes.imshow(picture)
    axes.axis("off")
    plt.show()
