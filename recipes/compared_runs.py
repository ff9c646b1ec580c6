"""Runs as ``rl compare`` reads them: settings, curves, and whether the run came to its end."""

import glob
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.callbacks import curves
from recipes.run import END, run_name
from recipes.run_files import (
    CURVES_BYTES,
    MOST_COLUMNS,
    Unreadable,
    content,
    folders_with,
    group,
    mapping,
    shown,
)
from rl_modules.common.errors import UsageError
from rl_modules.common.extras import install

#: Columns of the table, which no setting's name may be.
COLUMNS = (
    *("task", "metric", "run", "seeds", "n", "unfinished", "steps", "seconds", "worst", "final", "best", "iqm"),
    "p_above_first",
)


@dataclass(frozen=True)
class Result:
    """One run as it is compared: its name, as in ``PPO-CartPole-v1``, its seed, (step, value) by metric in the order of
    the steps, its settings by dotted name, and the seconds of its training, None where they are not known; its
    environment or data; the step at which it ends by its settings, and whether it came to its end, None where these are
    not known.
    """

    name: str
    seed: int
    curves: dict[str, list[tuple[int, float]]]
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    task: str = ""
    wanted: int | None = None
    ended: bool | None = None

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Returns the points of a metric that can be a result: an evaluation before the first step is none."""
        return [x for x in self.curves.get(metric, ()) if x[0] > 0 or not metric.startswith("eval/")]

    @property
    def last_step(self) -> int:
        """The last step of any curve."""
        return max(points[-1][0] for points in self.curves.values())

    @property
    def title(self) -> str:
        """The run in a sentence."""
        return f"{self.name}, seed {self.seed}"


def require_packages() -> None:
    """Raises where the packages of a comparison are missing."""
    if missing := [name for name in ("pandas", "rliable", "matplotlib") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"comparing runs needs {', '.join(missing)}, not installed here: {install('compare')}")


def read_all(places: Sequence[str | Path]) -> list[Result]:
    """Reads all runs in some places; of runs with the same settings and seed the last that came to its end, or the
    last. A line on standard error says which of several can't be read.
    """
    require_packages()
    found, refused = [], []
    for folder in dict.fromkeys(run for place in places for run in runs_in(place)):
        try:
            found.append(read(folder))
        except Unreadable as error:
            refused.append(str(error))
    if not found:
        raise UsageError("; ".join(refused[:3]))
    leave_out(refused)
    kept: dict[Any, Result] = {}
    for run in found:
        key = run.name, run.seed, str(sorted(run.settings.items()))
        if run.ended or key not in kept or not kept[key].ended:
            kept[key] = run
    return list(kept.values())


def leave_out(lines: Iterable[str]) -> None:
    """Says which runs are not compared, and why."""
    for line in lines:
        print(f"left out: {line}", file=sys.stderr)


def runs_in(place: str | Path) -> list[Path]:
    """Returns the folders of the runs in a folder or in those of a pattern, ``version_2`` before ``version_10``."""
    paths = [Path(path) for path in glob.glob(str(Path(place).expanduser()))] or [Path(place)]
    runs = {folder for path in paths for folder in folders_with("hparams.yaml", path)}
    if not runs:
        raise UsageError(
            f"{place} holds no run: its folder has an hparams.yaml, as `rl fit` writes it with "
            "TensorBoardLogger and CSVLogger"
        )
    return sorted(
        runs, key=lambda run: [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(run))]
    )


def read(folder: Path) -> Result:
    """Reads a run's settings and curves."""
    file = folder / "config.yaml"
    settings, config = mapping(folder / "hparams.yaml"), mapping(file) if os.path.lexists(file) else {}
    trainer = {
        f"trainer.{name}": value
        for name, value in (group(config, "trainer", file) if "trainer" in config else {}).items()
        if isinstance(value, int | float | str)
    }
    if not isinstance(seed := settings.get("seed", 0), int):
        raise Unreadable(folder / "hparams.yaml", f"has seed={shown(seed)}, where a whole number should be")
    has_events = next(folder.glob(curves.PATTERN), None) is not None
    if not has_events and not os.path.lexists(folder / "metrics.csv"):
        raise Unreadable(folder, "has no curves: neither TensorBoard's files nor metrics.csv")
    points = curves.points(folder) if has_events else _csv_points(folder / "metrics.csv")
    if not points:
        raise Unreadable(folder, "has no points of curves")
    seconds = curves.seconds(folder) if has_events else None
    if "time/time_elapsed" in points:
        seconds = points["time/time_elapsed"][-1][1]
    own = {name if name not in COLUMNS else f"settings.{name}": value for name, value in settings.items()}
    data: dict[str, Any] = settings
    name = folder.parent.name
    if {"model", "data"} <= config.keys():
        name, data = _name_of(config, file), group(group(config, "data", file), "init_args", file)
    task = run_name("", data, name.partition("-")[2] or name)[1:]
    last = max(curve[-1][0] for curve in points.values())
    wanted, ended = _end(folder, data, trainer, last)
    return Result(name, seed, points, {**own, **trainer}, seconds, task, wanted, ended)


def _end(folder: Path, data: dict[str, Any], trainer: dict[str, Any], last: int) -> tuple[int | None, bool | None]:
    """Where a run ends by its settings, and whether it did: there, or where the file says that its training ended."""
    limits = data.get("total_timesteps"), trainer.get("trainer.max_steps")
    wanted = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if wanted is not None and last >= wanted:
        return wanted, True
    if os.path.lexists(folder / END):
        text = content(folder / END, 100)
        return wanted, text.strip().isdigit() and last <= int(text)
    return wanted, None if wanted is None else False


def _name_of(config: dict[str, Any], file: Path) -> str:
    algorithm, data = (str(group(config, name, file).get("class_path")) for name in ("model", "data"))
    settings = group(group(config, "data", file), "init_args", file)
    return run_name(algorithm.rpartition(".")[2], settings, data.rpartition(".")[2])


def _csv_points(file: Path) -> dict[str, list[tuple[int, float]]]:
    import pandas as pd

    raw = content(file, CURVES_BYTES)
    header = raw[: 2**17].partition(b"\n")[0]
    if len(header) == 2**17 or header.count(b",") >= MOST_COLUMNS:
        raise Unreadable(file, f"has a first line of {len(header):,} bytes, where a run's names its columns")
    try:
        frame = pd.read_csv(io.BytesIO(raw), keep_default_na=False, na_values=[""], low_memory=False)
        frame = frame.sort_values("step", kind="stable").set_index("step")
        return {
            str(name): [(_step(step), float(value)) for step, value in frame[name].dropna().items()]
            for name in frame.columns.drop("epoch", errors="ignore")
            if frame[name].notna().any()
        }
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        said = "no column step" if isinstance(error, KeyError) else str(error)
        raise Unreadable(file, f"no table of curves: {said}") from error


def _step(given: Any) -> int:
    if not -(2**53) < given < 2**53:  # NaN, too
        raise ValueError(f"step={given}")
    return int(given)
