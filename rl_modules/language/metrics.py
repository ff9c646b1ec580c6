"""Metrics of the language algorithms: running means by name, one point of every curve per ``logging_steps``."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rl_modules.algorithm import Algorithm
from rl_modules.common.errors import UsageError
from rl_modules.core.curves import hand_to_callbacks, write_point
from rl_modules.core.settings import made
from rl_modules.core.state import persistent, transient
from rl_modules.language.throughput import Throughput, device_figures

#: Groups of metrics; a name without one belongs to training.
GROUPS = ("train/", "eval/", "test/", "time/")


def displayed_name(name: str) -> str:
    """The name of a training metric in every logger: ``train/reward`` for ``reward``, as transformers writes it."""
    return name if name.startswith(GROUPS) else f"train/{name}"


def monitored(trainer: L.Trainer) -> set[str]:
    """Metrics that callbacks of a Trainer monitor."""
    names = (getattr(callback, "monitor", None) for callback in getattr(trainer, "callbacks", ()))
    return {name for name in names if isinstance(name, str)}


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Returns a number on a device as float32, without a wait for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float32, non_blocking=True)
    # A fill, because a copy of a number from the host would synchronise.
    return torch.full((), float(value), dtype=torch.float32, device=device)


class LanguageMetrics(Algorithm):
    """Records and logs a language algorithm's metrics; the x-axis is the optimizer step."""

    #: Optimizer steps between two points of the curves.
    logging_steps: int = made()
    #: The last point of every curve, by displayed name.
    latest_metrics: dict[str, float] = transient({})
    #: The same without speeds, and without the extra point at the end of a run.
    regular_metrics: dict[str, float] = persistent({})
    #: Tokens that training has seen so far, prompts included and padding not, over all ranks.
    num_tokens: int = persistent(0)
    # The optimizer step of the last point.
    _logged_at: int = persistent(0)
    # Names that the module has recorded, and those that reward functions have logged, by displayed name.
    _own_names: set[str] = made()
    _logged_names: dict[str, str] = made()
    throughput: Throughput = made()

    @property
    def trained_models(self) -> list[Any]:
        """The models with weights that train: the policy, of RLHF by PPO also the value model."""
        models = [part for part in self.children() if hasattr(part, "config")]
        return [model for model in models if any(p.requires_grad for p in model.parameters())]

    def record(self, weight: Tensor | float = 1.0, /, **metrics: Tensor | float) -> None:
        """Adds scalars to their running means, which are logged every ``logging_steps`` as ``train/<name>``.

        Each update may record any subset of names. Does not synchronise with the device. Does nothing in evaluations,
        which call hooks such as ``loss`` too; :meth:`log_evaluation` takes their metrics.

        Args:
            weight: of this minibatch in the mean, such as its number of tokens; 0: ignored. By position or by name.
            metrics: scalars by name, tensors or numbers.

        Raises:
            UsageError: a value that is not a scalar, or a weight without metrics.
        """
        if list(metrics) == ["weight"]:
            raise UsageError(
                f"record(weight={metrics['weight']!r}) has no metric: weight is the minibatch's in the "
                "means of others; give a metric of yours another name"
            )
        weight = metrics.pop("weight", weight)
        self._own_names.update(metrics)
        if metrics and not (self._trainer is not None and self._trainer.evaluating):
            values = {name: _scalar(value, self.device) for name, value in metrics.items()}
            self._means.add(values, _scalar(weight, self.device))

    def record_logged(self, logged: dict[str, tuple[float, float]]) -> None:
        """Adds the values that reward functions logged: mean and weight by name."""
        self.claim_logged({displayed_name(name): name for name in logged})
        for name, (mean, weight) in logged.items():
            self.record(weight, **{name: mean})
        self._own_names.difference_update(logged)

    def claim_logged(self, names: Mapping[str, str]) -> None:
        """Refuses curves of reward functions, which have ``names`` for them, that are the module's own too."""
        self._logged_names |= names
        for curve in self._logged_names.keys() & set(map(displayed_name, self._own_names)):
            raise UsageError(
                f"log_metric({self._logged_names[curve]!r}, …) of a reward function: the run has a curve "
                "of this name; choose another"
            )

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        """Makes an optimizer step, frees the gradients, and hands a due point of the curves to monitoring callbacks."""
        super().optimizer_step(*arguments, **named)
        for optimizer in self.trainer.optimizers:  # Lightning would keep the gradients through the next forward pass
            optimizer.zero_grad()
        step = self.trainer.global_step + 1  # Lightning counts this one later
        if step % self.logging_steps == 0 and any(name.startswith("train/") for name in monitored(self.trainer)):
            hand_to_callbacks(self.trainer, self.summarize(self._means_over_ranks()))

    def write_due_metrics(self) -> None:
        """Logs one point of every training curve at each multiple of ``logging_steps``, once."""
        step = self.trainer.global_step
        if step != self._logged_at and step % self.logging_steps == 0:
            self.write_metrics()

    _after_on_train_batch_end = write_due_metrics

    def write_last_point(self) -> None:
        """Logs the means since the last point, which a run that resumes from here continues."""
        if self._means:
            unfinished = copy(self._means), self.regular_metrics
            self.write_metrics()
            self._means, self.regular_metrics = unfinished

    def write_metrics(self) -> None:
        """Logs one point of every training curve: means since the last point, over all ranks."""
        self.claim_logged({})
        step = self._logged_at = self.trainer.global_step
        metrics = self._means_over_ranks()
        metrics["train/learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        if self.num_tokens:
            metrics["train/num_tokens"] = float(self.num_tokens)
        rates = self.throughput.rates(self.num_tokens, self.trainer.strategy, self.trainer.world_size)
        metrics |= {**rates, **device_figures(torch.nn.ModuleList(self.trained_models), self.trainer, rates)}
        metrics = self.summarize(metrics)
        self.latest_metrics.update(metrics)
        hand_to_callbacks(self.trainer, metrics)
        write_point(self.trainer, metrics, step)
        # Reward functions may read the last point, also after a resume. Speeds differ from run to run.
        latest = {name: float(x) for name, x in metrics.items() if not name.startswith("time/")}
        self.regular_metrics = {**self.regular_metrics, **latest}
        self._means = type(self._means)()

    def _means_over_ranks(self) -> dict[str, float]:
        """Means of what was recorded since the last point, by displayed name; ranks call this together."""
        return {displayed_name(name): mean for name, mean in self._means.means(self.trainer).items()}

    def answer_monitors(self) -> None:
        """Gives callbacks the running means of the metrics that they monitor, before the first point of the curves."""
        known = self.trainer.callback_metrics
        unknown = [
            name
            for name in monitored(self.trainer) - self.latest_metrics.keys()
            if name.startswith("train/") or name not in known
        ]
        if all(name.startswith("eval/") for name in unknown):
            return
        means = self.summarize(self._means_over_ranks())
        hand_to_callbacks(self.trainer, {name: means[name] for name in unknown if name in means})

    _after_on_train_epoch_end = answer_monitors

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds functions of means, ``train/…`` or ``eval/…``, such as the perplexity; called before logging."""
        return metrics

    def log_evaluation(self, metrics: dict[str, Tensor], weight: int) -> None:
        """Adds means over one batch, ``eval/…``, with its number of prompts or tokens as weight."""
        self._own_names.update(metrics)
        self._log_means(metrics, weight)

    def _log_means(self, metrics: dict[str, Tensor], weight: int) -> None:
        # Lightning takes the mean of the ranks' weights in integers: without a remainder it is exact.
        weight *= self.trainer.world_size
        self.log_dict(
            metrics, on_step=False, on_epoch=True, logger=not self.is_fitting, batch_size=weight, sync_dist=True
        )

    def finish_evaluation(self) -> None:
        """Logs what follows from the means of an evaluation, and draws them in a ``fit``; a subclass extends it."""
        means = {k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("eval/")}
        metrics = self.summarize(means)
        # The means include the derived metrics of the last evaluation.
        if derived := {name: value for name, value in metrics.items() if means.get(name) != value}:
            self.log_dict(derived, logger=not self.is_fitting)
        if self.is_fitting:
            write_point(self.trainer, metrics, self.place)
