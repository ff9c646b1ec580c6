"""Metrics by name: accumulated on the device, reduced once per point of the curves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules.common.errors import UsageError

#: Reductions that keep one number by name.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


class MetricSums:
    """Sums of named scalars since the last point of the curves.

    ``add`` costs one kernel and never waits for the device. Different calls may bring different names.
    """

    def __init__(self) -> None:
        # Scalars of one call are stored together: one stack per call instead of one sum per name.
        self._rows: dict[tuple[str, ...], list[Tensor]] = {}
        self._numbers: dict[str, tuple[float, int]] = {}
        self._reduced: dict[str, tuple[str, Tensor]] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Adds one value to each name's sum.

        Raises:
            UsageError: a value is not a scalar.
        """
        if torch.compiler.is_compiling():
            _add_outside_of_graphs(self, values)
        else:
            self._add(values)

    def _add(self, values: Mapping[str, Tensor | float]) -> None:
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                total, count = self._numbers.get(name, (0.0, 0))
                self._numbers[name] = (total + float(value), count + 1)
            elif value.dim() and value.numel() != 1:
                raise UsageError(f"the metric {name} has shape {tuple(value.shape)}; record takes scalars")
            else:
                tensors[name] = value.detach().float().reshape(())
        if tensors:
            self._rows.setdefault(tuple(tensors), []).append(torch.stack(list(tensors.values())))

    def reduce(self, name: str, value: Tensor | float, how: str) -> None:
        """Reduces one value of a name to the sum, largest or smallest since the last point.

        Args:
            name: of the metric.
            value: a scalar.
            how: ``sum``, ``max`` or ``min``.
        """
        value = torch.as_tensor(value, dtype=torch.float32).detach().reshape(())
        known = self._reduced.get(name)
        self._reduced[name] = (how, value if known is None else REDUCTIONS[how](known[1], value))

    def means(self, strategy: Strategy | None = None) -> dict[str, float]:
        """Returns the mean of every name, or its sum, largest or smallest value.

        Args:
            strategy: with several ranks, reduces over all of them, which call this together; None: this rank only.
        """
        sums = dict(self._numbers)
        for names, rows in self._rows.items():
            for name, total in zip(names, torch.stack(rows).sum(0).tolist(), strict=True):
                before, count = sums.get(name, (0.0, 0))
                sums[name] = (before + total, count + len(rows))
        reduced = self._reduced
        if strategy is not None:
            sums, reduced = _over_ranks(sums, strategy.root_device), _reduced_over_ranks(reduced, strategy.root_device)
        means = {name: total / count for name, (total, count) in sums.items()}
        return {**means, **{name: float(value) for name, (_, value) in reduced.items()}}

    def clear(self) -> None:
        """Begins the next point."""
        self._rows.clear()
        self._numbers.clear()
        self._reduced.clear()

    def state_dict(self) -> dict[str, Any]:
        rows = [{"names": list(names), "values": torch.stack(rows).cpu()} for names, rows in self._rows.items()]
        reduced = {name: [how, value.cpu()] for name, (how, value) in self._reduced.items()}
        numbers = {name: list(sums) for name, sums in self._numbers.items()}
        return {"rows": rows, "numbers": numbers, "reduced": reduced}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restores what :meth:`state_dict` returned, with the sums on ``device``, like the next values."""
        self._rows = {tuple(row["names"]): list(row["values"].to(device).unbind(0)) for row in state["rows"]}
        self._numbers = {name: (total, count) for name, (total, count) in state["numbers"].items()}
        self._reduced = {name: (how, value.to(device)) for name, (how, value) in state.get("reduced", {}).items()}


@_disable_dynamo
def _add_outside_of_graphs(sums: MetricSums, values: Mapping[str, Tensor | float]) -> None:
    """Adds values outside of compiled graphs, because a graph would be specialised to one length of the sums."""
    sums._add(values)


def _over_ranks(sums: dict[str, tuple[float, int]], device: torch.device) -> dict[str, tuple[float, int]]:
    """Sums and counts over all ranks. A rank may lack a name that another has."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, list(sums))
    names = list(dict.fromkeys(name for part in everyone for name in part))
    table = torch.tensor([sums.get(name, (0.0, 0)) for name in names], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(table)
    return {name: (total, int(count)) for name, (total, count) in zip(names, table.tolist(), strict=True)}


def _reduced_over_ranks(reduced: dict[str, tuple[str, Tensor]], device: torch.device) -> dict[str, tuple[str, Tensor]]:
    """Sums, maxima and minima over all ranks. A rank may lack a name that another has."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, {name: (how, float(x)) for name, (how, x) in reduced.items()})
    merged: dict[str, tuple[str, Tensor]] = {}
    for part in everyone:
        for name, (how, number) in part.items():
            value = torch.tensor(number, dtype=torch.float32)
            merged[name] = (how, REDUCTIONS[how](merged[name][1], value) if name in merged else value)
    return merged
