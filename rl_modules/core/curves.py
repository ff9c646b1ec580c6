"""What the curves of both families share: means by name since the last point, loggers, values for callbacks."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, distributed
from torch._compile import _disable_dynamo

from rl_modules.common.errors import UsageError
from rl_modules.loggers import adapters

if TYPE_CHECKING:
    from rl_modules.algorithm import Algorithm


#: The evaluation that is drawn beside the learning curve, before the others.
FIRST_EVALUATION = "eval/mean_reward"
#: Reductions that keep one number by name.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Means:
    """Means of named scalars since the last point of the curves, sums, maxima and minima; ``add`` never waits."""

    def __init__(self) -> None:
        # The scalars of one call are stored together, one stack per call instead of one sum per name. Weighted ones are
        # stored times their weight, which comes last.
        self._rows: dict[tuple[tuple[str, ...], bool], list[Tensor]] = {}
        self._numbers: dict[str, tuple[float, float]] = {}
        self._reduced: dict[str, tuple[str, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows or self._numbers or self._reduced)

    def __iter__(self) -> Any:
        """The names."""
        return iter([*self._numbers, *(name for names, _ in self._rows for name in names), *self._reduced])

    def add(self, values: Mapping[str, Tensor | float], weight: Tensor | None = None) -> None:
        """Adds one scalar to the mean of each name; ``weight`` is that of all of them, 0 where they do not count."""
        if torch.compiler.is_compiling():
            _add_outside_of_graphs(self, values, weight)
            return
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.dim() and value.numel() != 1:
                    raise UsageError(f"the metric {name} has shape {tuple(value.shape)}; record takes scalars")
                tensors[name] = value.detach().float().reshape(())
            else:
                total, count = self._numbers.get(name, (0.0, 0.0))
                self._numbers[name] = (total + float(value), count + 1)
        if not tensors:
            return
        row = torch.stack(list(tensors.values()))
        if weight is not None:  # the value of a weight of 0 may be NaN, which must not spread
            row = torch.cat([torch.where(weight > 0, row * weight, 0.0), weight.reshape(1)])
        self._rows.setdefault((tuple(tensors), weight is not None), []).append(row)

    def reduce(self, name: str, value: Tensor | float, how: str) -> None:
        """Reduces a name's values to their ``sum``, ``max`` or ``min`` since the last point."""
        value = torch.as_tensor(value, dtype=torch.float32).detach().reshape(())
        known = self._reduced.get(name)
        self._reduced[name] = (how, value if known is None else REDUCTIONS[how](known[1], value))

    def means(self, trainer: Any = None) -> dict[str, float]:
        """Returns each name's mean, sum, largest or smallest value, over all ranks, which call this together."""
        sums, reduced = dict(self._numbers), self._reduced
        found = [torch.stack(rows).sum(0) for rows in self._rows.values()]
        totals = iter(torch.cat(found).tolist() if found else [])
        for (names, is_weighted), rows in self._rows.items():
            own = [next(totals) for _ in names]
            more = next(totals) if is_weighted else len(rows)
            for name, total in zip(names, own, strict=True):
                before, count = sums.get(name, (0.0, 0.0))
                sums[name] = (before + total, count + more)
        if trainer is not None and trainer.world_size > 1:
            sums, reduced = sums_of_ranks(sums, reduced, trainer.strategy.root_device)
        means = {name: total / count for name, (total, count) in sums.items() if count > 0}
        return {**means, **{name: float(value) for name, (_, value) in reduced.items()}}

    def begun_anew(self) -> "Means":
        """Returns empty ones, for the next point."""
        return type(self)()

    def to(self, device: torch.device) -> None:
        """Moves the sums to the device of the next values."""
        self._rows = {key: [row.to(device) for row in rows] for key, rows in self._rows.items()}
        self._reduced = {name: (how, value.to(device)) for name, (how, value) in self._reduced.items()}

    def state_dict(self) -> dict[str, Any]:
        rows = [
            {"names": list(names), "weighted": weighted, "values": torch.stack(rows).cpu()}
            for (names, weighted), rows in self._rows.items()
        ]
        reduced = {name: [how, value.cpu()] for name, (how, value) in self._reduced.items()}
        return {"rows": rows, "numbers": {name: list(x) for name, x in self._numbers.items()}, "reduced": reduced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = {(tuple(row["names"]), row["weighted"]): list(row["values"].unbind(0)) for row in state["rows"]}
        self._numbers = {name: (total, count) for name, (total, count) in state["numbers"].items()}
        self._reduced = {name: (how, value) for name, (how, value) in state["reduced"].items()}


@_disable_dynamo
def _add_outside_of_graphs(means: Means, values: Mapping[str, Tensor | float], weight: Tensor | None) -> None:
    """A graph would be specialised to one length of the lists."""
    means.add(values, weight)


# ---------------------------------------------------------------- loggers and callbacks


def write_point(trainer: L.Trainer, metrics: Mapping[str, float], place: int) -> None:
    """Writes one point of each curve to each logger, those of learning and evaluation also before the others."""
    if not trainer.loggers:
        return

    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=place)
    learner: Any = trainer.lightning_module
    for name in (learner.learning_curve, FIRST_EVALUATION):
        for adapter in adapters(trainer) if name in metrics else ():
            adapter.write_learning_curve(name, metrics[name], place)


def write_evaluation(module: "Algorithm", metrics: Mapping[str, Tensor | float], **options: Any) -> None:
    """Draws an evaluation's means in a ``fit``; otherwise Lightning prints them; options of ``log_dict``."""
    module.log_dict(metrics, logger=not module.is_fitting, **options)
    if module.is_fitting:
        write_point(module.trainer, {name: float(value) for name, value in metrics.items()}, module.place)


def hand_to_callbacks(trainer: L.Trainer, metrics: Mapping[str, float]) -> None:
    """Makes metrics of training known to callbacks; Lightning's ``log_dict`` would take 0.3 ms per name."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float32).unbind()
    trainer.callback_metrics.update(zip(metrics, values, strict=True))


def sums_of_ranks(sums: dict, reduced: dict, device: torch.device) -> tuple[dict, dict]:
    """Sums, counts and reduced values of all ranks. A rank may lack a name that another has."""
    everyone: list[Any] = [None] * distributed.get_world_size()
    numbers = {name: (how, float(x)) for name, (how, x) in reduced.items()}
    distributed.all_gather_object(everyone, (list(sums), numbers))
    names = list(dict.fromkeys(name for part, _ in everyone for name in part))
    if names:
        table = torch.tensor([sums.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64, device=device)
        distributed.all_reduce(table)
        sums = dict(zip(names, map(tuple, table.tolist()), strict=True))
    merged: dict[str, tuple[str, Tensor]] = {}
    for _, part in everyone:
        for name, (how, number) in part.items():
            value = torch.tensor(number, dtype=torch.float32)
            merged[name] = (how, REDUCTIONS[how](merged[name][1], value) if name in merged else value)
    return sums, merged
