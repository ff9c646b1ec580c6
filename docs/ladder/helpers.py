"""What the field guide's notebooks share: a quiet ``fit`` that returns the curves, seeds, plots and grid pictures.

``LADDER_SHORT=1`` makes every run one epoch or two steps of one seed: the tests execute all notebooks so.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from datamodules.envs.model import TransitionModel, transition_model
from datamodules.envs.vector import make_env
from recipes.pictures import draw_values

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
try:
    from transformers.utils import logging as transformers_logging
except ImportError:  # the rungs before the reward model need no language model
    pass
else:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

SHORT = os.environ.get("LADDER_SHORT") == "1"
KEPT = Path(__file__).with_name("curves.json")
#: A run's curves: for each metric its points (step, value).
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


def fit(model: L.LightningModule, data: L.LightningDataModule, max_steps: int = -1) -> Curves:
    """Trains on the CPU, to the datamodule's ``total_timesteps`` or for ``max_steps``; returns the curves."""
    memory = Memory()
    length = {"max_epochs": 1, "max_steps": min(max_steps, 2)} if SHORT else {"max_epochs": -1, "max_steps": max_steps}
    L.Trainer(
        **length, accelerator="cpu", logger=memory, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, datamodule=data)  # fmt: skip
    return memory.curves


def fit_seeds(train: Callable[[int], Curves], seeds: Sequence[int] = (0, 1, 2)) -> list[Curves]:
    """Calls ``train(seed)`` for several seeds; returns their curves."""
    return [train(seed) for seed in (seeds[:1] if SHORT else seeds)]


def final(runs: list[Curves], metric: str) -> list[float]:
    """Returns the last value of a metric in each run."""
    return [round(run[metric][-1][1], 3) for run in runs]


def plot(
    runs: dict[str, Curves | list[Curves]],
    metric: str,
    xlabel: str,
    ylabel: str,
    best: float | None = None,
    log: bool = False,
) -> None:
    """Draws a metric; of several seeds their mean, with a band from the smallest to the largest value.

    Args:
        runs: name → the curves of one run, or a list of those of several seeds.
        metric: to draw.
        xlabel: of the axis.
        ylabel: of the axis.
        best: the exact optimum, a dashed line.
        log: logarithmic y-axis.
    """
    _, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, several in runs.items():
        several = [several] if isinstance(several, dict) else several
        points = [dict(run.get(metric, [])) for run in several]
        steps = sorted(set(points[0]).intersection(*points[1:]))
        values = torch.tensor([[run[step] for step in steps] for run in points])
        if steps:
            [line] = axes.plot(steps, values.mean(0), label=name, marker="." if len(steps) < 20 else None)
            axes.fill_between(steps, values.amin(0), values.amax(0), alpha=0.2, color=line.get_color(), linewidth=0)
    if best is not None:
        axes.axhline(best, color="gray", linestyle="--", linewidth=1, label="exact optimum")
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    if len(runs) > 1 or best is not None:
        axes.legend()
    plt.show()


def keep(name: str, runs: list[Curves], metric: str) -> None:
    """Writes a metric's curves to the file that the last page draws."""
    if not SHORT:
        kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
        kept[name] = [[[step, round(value, 4)] for step, value in run[metric]] for run in runs]
        lines = [f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept)]
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def known(env_id: str, **env_kwargs: Any) -> TransitionModel:
    """Returns the transition table of an environment: ``transition`` [S, A, S], ``reward`` [S, A], the end last."""
    model = transition_model(make_env(env_id, env_kwargs))
    assert model is not None
    return model


def draw(q: Tensor, model: TransitionModel, title: str) -> None:
    """Draws the values and best actions of a grid world."""
    picture = draw_values(q[: model.states], model, (title,))
    _, axes = plt.subplots(figsize=(5, 5 * picture.shape[0] / picture.shape[1]), layout="constrained")
    axes.imshow(picture)
    axes.axis("off")
    plt.show()
