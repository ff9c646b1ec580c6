"""``rl verify``: recomputes a run from one checkpoint to another and compares the two results."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
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


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every value of a part of a checkpoint with its path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def distance(a: Any, b: Any) -> float:
    """Largest absolute difference of two values, of any at all infinity; NaN is equal to itself."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return 0.0 if repr(a) == repr(b) else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    x, y = a.double().flatten(), b.double().flatten()
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
    return float(gap.nan_to_num(float("inf")).amax()) if len(gap) else 0.0


@dataclass
class Verdict:
    """Result of a verification.

    Attributes:
        start: where the recomputation began; None: at the run's beginning.
        end: the checkpoint that was compared.
        differences: each value's largest absolute difference by its path; infinite where shapes or kinds differ.
        points: points of curves that were compared.
        first_point: the first that differs: step, curve, the run's value, the new one.
    """

    start: Saved | None
    end: Saved
    differences: dict[str, float]
    points: int = 0
    first_point: tuple[int, str, float, float] | None = None

    @property
    def different(self) -> dict[str, float]:
        """The values that differ."""
        return {path: size for path, size in self.differences.items() if size}

    @property
    def is_same(self) -> bool:
        """Whether state and curves are the same, bit for bit."""
        return not self.different and self.first_point is None

    def __str__(self) -> str:
        begin = "its beginning" if self.start is None else f"{self.start.name}.ckpt (update {self.start.step:,})"
        span = f"recomputed from {begin} to {self.end.name}.ckpt (update {self.end.step:,})"
        n = len(self.differences)
        if self.is_same:
            return f"{span}: the same, bit for bit: {n} values, {self.points} points of curves"
        lines = [span + ": not the same"]
        if found := self.different:
            weights = {path: size for path, size in found.items() if path.startswith("state_dict/")} or found
            largest = max(weights, key=lambda path: weights[path])
            lines.append(
                f"{len(found)} of {n} values differ; the largest difference is {weights[largest]:.2g}, in {largest}"
            )
        if self.first_point is not None:
            step, tag, before, now = self.first_point
            lines.append(f"the first point of a curve that differs is {tag} at step {step:,}: {before!r}, now {now!r}")
        return "\n".join(lines)


class _Comparer(L.Callback):
    """Compares the running state with a checkpoint where its position is reached: between batches, or at the end."""

    def __init__(self, end: Saved, folder: Path) -> None:
        self.end, self.folder = end, folder
        self.differences: dict[str, float] | None = None

    def __call__(self, trainer: L.Trainer) -> None:
        if position_of(trainer) == self.end.position:
            file = self.folder / "here.ckpt"
            trainer.save_checkpoint(file, weights_only=False)
            checkpoints = saved_runs.read(self.end.path), torch.load(file, weights_only=True, map_location="cpu")
            before, now = (
                dict(leaf for key, part in one.items() if key not in NOT_COMPARED for leaf in leaves(part, key))
                for one in checkpoints
            )
            self.differences = {
                path: distance(before.get(path, ...), now.get(path, ...)) for path in sorted(before.keys() | now.keys())
            }
            for logger in trainer.loggers:
                logger.save()
            raise Reached

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self(trainer)  # no batch follows, before which it would be called


def verify(run: Path, start: str | None = None, trusted: bool = False) -> Verdict:
    """Recomputes a run up to its last checkpoint; its settings may name other code only where it is ``trusted``."""
    saved = checkpoints_of(run)
    if not saved:
        raise UsageError(f"{run} has no checkpoint in {run / 'checkpoints'}, so there is nothing to compare with")
    end = saved[-1]
    earlier = {one.name: one for one in saved if one.step < end.step}
    if start not in (None, "start", *earlier):
        raise UsageError(
            f"from={start!r} is no checkpoint before {end.name}.ckpt; there are {', '.join(['start', *earlier])}"
        )
    begin = earlier.get(start or next(reversed(earlier), "start"))
    with settings(run, begin, trusted) as (folder, arguments):
        comparer = _Comparer(end, folder)
        with contextlib.suppress(Reached):
            Recomputation(arguments, comparer, comparer)
        if comparer.differences is None:
            raise UsageError(
                f"recomputed, {run} did not reach {end.path}, which has {end.step} updates: its settings "
                "were changed when it was resumed, or other code ran"
            )
        old, new = curves.points(run), curves.points(folder / "again" / "version_0")
    verdict = Verdict(begin, end, comparer.differences)
    before = {(tag, *at): value for tag, points in old.items() for *at, value in points}
    for step, tag, now in ((step, tag, value) for tag, points in new.items() for step, value in points):
        if tag not in CLOCKS and (was := before.get((tag, step))) is not None:
            verdict.points += 1
            if repr(was) != repr(now) and (verdict.first_point is None or (step, tag) < verdict.first_point[:2]):
                verdict.first_point = (step, tag, was, now)
    return verdict
