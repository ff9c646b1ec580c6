"""``rl verify``: recomputes a run from one checkpoint to another and compares the two results."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from recipes import saved_runs
from recipes.callbacks import curves
from recipes.cli.recomputation import Reached, Recomputation, Saved, checkpoints_of, position_of, settings
from rl_modules.common.errors import UsageError

#: Parts of a checkpoint that differ between runs: versions, paths and files of the run itself.
NOT_COMPARED = ("pytorch-lightning_version", "loops", "callbacks")
#: Curves of the clock.
CLOCKS = (
    "time/fps",
    "time/time_elapsed",
    "time/sampling_tokens_per_second",
    "time/training_tokens_per_second",
    "time/peak_memory_gib",
    "time/model_flops_utilization",
)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of a checkpoint with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if path or key not in NOT_COMPARED:
                yield from leaves(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, tree


@dataclass
class Comparison:
    """The differences between two states."""

    compared: int = 0
    #: Path of each value that differs, with the largest absolute difference (infinite where shapes or kinds differ).
    different: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, one: dict[str, Any], other: dict[str, Any]) -> "Comparison":
        """Compares two checkpoints value by value; NaN is equal to itself."""
        left, right = dict(leaves(one)), dict(leaves(other))
        found = cls(compared=len(left.keys() | right.keys()))
        for path in sorted(left.keys() | right.keys()):
            distance = _distance(left.get(path), right.get(path)) if path in left and path in right else float("inf")
            if distance is not None:
                found.different[path] = distance
        return found

    @property
    def largest(self) -> tuple[str, float]:
        """Path and size of the largest difference among the weights, or among everything where they agree."""
        weights = {path: size for path, size in self.different.items() if path.startswith("state_dict/")}
        chosen = weights or self.different
        path = max(chosen, key=lambda name: chosen[name])
        return path, chosen[path]


def _distance(a: Any, b: Any) -> float | None:
    """Largest absolute difference of two values; None where they are equal bit for bit."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None if repr(a) == repr(b) else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return None
    x, y = a.double(), b.double()
    both_nan = torch.isnan(x) & torch.isnan(y)
    gap = torch.where(both_nan, 0.0, (x - y).abs())
    return None if not gap.any() else float(torch.nan_to_num(gap, nan=float("inf")).max())


@dataclass
class Verdict:
    """Result of a verification."""

    start: Saved | None
    end: Saved
    comparison: Comparison
    #: Points of curves that were compared, and the first that differs: curve, step, the run's value, the new one.
    points: int = 0
    first_point: tuple[str, int, float, float] | None = None

    @property
    def is_same(self) -> bool:
        """Whether state and curves are the same, bit for bit."""
        return not self.comparison.different and self.first_point is None

    def __str__(self) -> str:
        begin = "its beginning" if self.start is None else f"{self.start.name}.ckpt (update {self.start.step:,})"
        span = f"recomputed from {begin} to {self.end.name}.ckpt (update {self.end.step:,})"
        if self.is_same:
            return f"{span}: the same, bit for bit: {self.comparison.compared} values, {self.points} points of curves"
        lines = [span + ": not the same"]
        if self.comparison.different:
            path, size = self.comparison.largest
            lines.append(
                f"{len(self.comparison.different)} of {self.comparison.compared} values differ; the largest "
                f"difference is {size:.2g}, in {path}"
            )
        if self.first_point is not None:
            tag, step, before, now = self.first_point
            lines.append(f"the first point of a curve that differs is {tag} at step {step:,}: {before!r}, now {now!r}")
        return "\n".join(lines)


class _Comparer:
    """Compares the running state with a checkpoint when its position is reached."""

    def __init__(self, end: Saved, folder: Path) -> None:
        self.end, self.folder = end, folder
        self.comparison: Comparison | None = None

    def __call__(self, trainer: L.Trainer) -> None:
        if position_of(trainer) == self.end.position:
            file = self.folder / "here.ckpt"
            trainer.save_checkpoint(file, weights_only=False)
            here = torch.load(file, weights_only=True, map_location="cpu")  # as the other
            self.comparison = Comparison.of(saved_runs.read(self.end.path), here)
            for logger in trainer.loggers:
                logger.save()
            raise Reached


def verify(run: Path, start: str | None = None, trusted: bool = False) -> Verdict:
    """Recomputes a run up to its last checkpoint; its settings may name other code only where it is ``trusted``."""
    saved = checkpoints_of(run)
    if not saved:
        raise UsageError(f"{run} has no checkpoint in {run / 'checkpoints'}, so there is nothing to compare with")
    end = saved[-1]
    earlier = [one for one in saved if one.step < end.step]
    by_name = {one.name: one for one in earlier}
    if start not in (None, "start", *by_name):
        raise UsageError(
            f"from={start!r} is no checkpoint before {end.name}.ckpt; there are {', '.join(['start', *by_name])}"
        )
    begin = (earlier[-1] if earlier else None) if start is None else by_name.get(start)
    with settings(run, begin, trusted) as (folder, arguments):
        comparer = _Comparer(end, folder)
        with contextlib.suppress(Reached):
            Recomputation(arguments, [_AtEnd(comparer)], comparer)
        if comparer.comparison is None:
            raise UsageError(
                f"recomputed, {run} did not reach {end.path}, which has {end.step} updates: its settings "
                "were changed when it was resumed, or other code ran"
            )
        verdict = Verdict(begin, end, comparer.comparison)
        _compare_curves(verdict, run, folder / "again" / "version_0")
    return verdict


class _AtEnd(L.Callback):
    """Compares after the last batch, which no other follows."""

    def __init__(self, comparer: _Comparer) -> None:
        self.comparer = comparer

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.comparer(trainer)


def _compare_curves(verdict: Verdict, run: Path, folder: Path) -> None:
    old, new = curves.points(run), curves.points(folder)
    found: list[tuple[int, str, float, float]] = []
    for tag, points in new.items():
        before = dict(old.get(tag, []))
        for step, value in points:
            if tag in CLOCKS or step not in before:
                continue
            verdict.points += 1
            if repr(before[step]) != repr(value):
                found.append((step, tag, before[step], value))
    if found:
        step, tag, one, other = min(found)
        verdict.first_point = (tag, step, one, other)
