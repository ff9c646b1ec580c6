"""What the field guide's notebooks share: a quiet ``fit`` that returns the curves, seeds, intervals, plots, pictures.

``LADDER_SHORT=1`` makes every run one epoch or two steps of one seed: the tests execute all notebooks so.
"""

import json
import logging
import math
import os
import random
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
from recipes.callbacks.pictures import draw_values

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


def fit(
    model: L.LightningModule, data: L.LightningDataModule, max_steps: int = -1, callbacks: Sequence[L.Callback] = ()
) -> Curves:
    """Trains on the CPU, to the datamodule's ``total_timesteps`` or for ``max_steps``; returns the curves."""
    memory = Memory()
    length = {"max_epochs": 1, "max_steps": min(max_steps, 2)} if SHORT else {"max_epochs": -1, "max_steps": max_steps}
    L.Trainer(
        **length, accelerator="cpu", logger=memory, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[*callbacks],
    ).fit(model, datamodule=data)  # fmt: skip
    return memory.curves


def fit_seeds(train: Callable[[int], Curves], seeds: Sequence[int] = (0, 1, 2)) -> list[Curves]:
    """Calls ``train(seed)`` for several seeds; returns their curves."""
    return [train(seed) for seed in (seeds[:1] if SHORT else seeds)]


def final(runs: list[Curves], metric: str) -> list[float]:
    """Returns the last value of a metric in each run."""
    return [round(run[metric][-1][1], 3) for run in runs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of independent runs and the half width of its 95 % interval, by Student's t distribution."""
    spread = torch.as_tensor(values, dtype=torch.float64)
    free = max(len(spread) - 1, 1)
    quantile = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}.get(free, 1.96 + 2.37 / free + 2.82 / free**2)
    return float(spread.mean()), quantile * float(spread.std(correction=min(len(spread) - 1, 1))) / len(spread) ** 0.5


def plot(
    runs: dict[str, Curves | list[Curves]],
    metric: str,
    xlabel: str,
    ylabel: str,
    best: float | None = None,
    best_name: str = "exact optimum",
) -> None:
    """Draws a metric; of several seeds their mean, with a band from the smallest to the largest value.

    Args:
        runs: name → the curves of one run, or a list of those of several seeds.
        metric: to draw.
        xlabel: of the axis.
        ylabel: of the axis.
        best: a dashed line.
        best_name: what it is.
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
        axes.axhline(best, color="gray", linestyle="--", linewidth=1, label=best_name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
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


#: All sums of two digits; all completions of one or two digits, among which the pages on language models enumerate; and
#: which of them is right.
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]
SUMS = [a + b for a in range(10) for b in range(10)]
ANSWERS = [*"0123456789", *(f"{number:02d}" for number in range(100))]
RIGHT = torch.tensor([ANSWERS.index(str(total)) for total in SUMS])
#: A transformer of two layers and 64 dimensions.
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


@torch.no_grad()
def log_probs(policy: Any) -> Tensor:
    """Returns log π(y|x) of every answer to every prompt, with the end token, [100 prompts, 110 answers].

    Answers with the same first tokens share their part of the cache: 11,400 tokens are read in place of 77,000.
    """
    tokenizer, model = policy.tokenizer, policy.model
    digits = torch.tensor(tokenizer("0123456789").input_ids)
    read = model(input_ids=torch.tensor([tokenizer(prompt).input_ids for prompt in PROMPTS]), use_cache=True)
    total, ended = torch.zeros(1), []
    for _ in range(2):
        total = (total[..., None] + read.logits[:, -1].log_softmax(-1)[:, digits]).flatten()
        read.past_key_values.batch_repeat_interleave(10)
        next_digit = digits.repeat(len(total) // 10)[:, None]
        read = model(input_ids=next_digit, past_key_values=read.past_key_values, use_cache=True)
        ended.append((total + read.logits[:, -1].log_softmax(-1)[:, tokenizer.eos_token_id]).view(len(PROMPTS), -1))
    return torch.cat(ended, 1)


class Enumerated(L.Callback):
    """Measures a policy by the exact probabilities of all answers, at the start and every some optimizer steps.

    Args:
        measure: from :func:`log_probs` to numbers by name, which become curves.
        every: optimizer steps.
    """

    def __init__(self, measure: Callable[[Tensor], dict[str, float]], every: int) -> None:
        self.measure, self.every = measure, every

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measures the start."""
        trainer.logger.log_metrics(self.measure(log_probs(pl_module)), trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Measures after each step that is due."""
        if trainer.global_step % self.every == 0:
            self.on_train_start(trainer, pl_module)


def pass_rate(policy: Any) -> float:
    """Returns the exact probability that a sampled answer is the right sum, mean over the prompts."""
    return float(log_probs(policy)[torch.arange(100), RIGHT].exp().mean())


def write_comparisons(path: Path, n: int, seed: int) -> None:
    """Writes comparisons of two answers between 0 and 18, drawn from the Bradley-Terry model with the reward of
    :func:`true_reward`.
    """
    rng = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(n):
            i = rng.randrange(100)
            first, second = rng.sample(range(19), 2)
            wins = 1 / (1 + math.exp(true_reward(i, second) - true_reward(i, first)))
            if rng.random() > wins:
                first, second, wins = second, first, 1 - wins
            record = {"prompt": PROMPTS[i], "chosen": str(first), "rejected": str(second), "probability": wins}
            file.write(json.dumps(record) + "\n")


def true_reward(prompt: int, answer: int) -> float:
    """Returns the reward behind the comparisons: 0 for the right sum, -2 for each unit away from it."""
    return -2.0 * abs(answer - SUMS[prompt])
