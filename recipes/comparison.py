"""Runs side by side: what differs in their settings, what they reached over seeds, and their curves on one axis."""

import glob
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.callbacks import curves
from recipes.run import run_name
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
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.extras import install

if TYPE_CHECKING:
    import pandas as pd

#: Metrics that compare runs where none is named: the first that all of them log.
METRICS = (
    "eval/true_return",
    "eval/mean_reward",
    "eval/pass@1",
    "eval/accuracy",
    "eval/rewards/accuracies",
    "eval/rewards/margins",
    "eval/scores",
    "eval/loss",
    "rollout/ep_rew_mean",
    "train/reward",
    "train/accuracy",
    "train/rewards/accuracies",
    "train/rewards/margins",
    "train/objective/scores",
    "train/loss",
    "train/mean_token_accuracy",
    "train/objective/kl",
)
#: Metrics of few points, and the curve that is drawn for them.
DRAWN = {"eval/mean_reward": "rollout/ep_rew_mean"}
#: Seeds from which a bootstrap interval is given.
FEWEST = 3
#: Resamples of the bootstrap.
RESAMPLES = 2_000
#: Columns of the table, which no setting's name may be.
COLUMNS = ("run", "seeds", "n", "steps", "seconds", "worst", "final", "best", "iqm", "p_above_first")
#: Settings that a run's name or the column of seeds shows, or that say where it ran.
_SHOWN = re.compile(r"seed|env_id|trainer\.(accelerator|devices|default_root_dir|enable_progress_bar)")


@dataclass(frozen=True)
class Result:
    """One run as it is compared: its name, as in ``PPO-CartPole-v1``, its seed, (step, value) by metric in the order of
    the steps, its settings by dotted name, and the seconds of its training, None where they are not known.
    """

    name: str
    seed: int
    curves: dict[str, list[tuple[int, float]]]
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


def compare(*runs: str | Path, metric: str | None = None, mode: str | None = None) -> "pd.DataFrame":
    """Compares runs: a row for runs that differ in their seed alone.

    Args:
        *runs: folders of runs, folders with runs below them such as a sweep's, and patterns such as ``logs/*/*``.
        metric: by which they are compared; None: the first of :data:`METRICS` that all of them log.
        mode: ``max`` or ``min``, the direction in which the metric improves; None: ``min`` for a loss, else ``max``.

    Returns:
        Columns: ``run``; every setting that differs; ``seeds`` and ``n``, their number; ``steps`` and ``seconds``, the
        median; ``final`` and ``best``, the mean over seeds of the last and the best value; ``iqm``, the interquartile
        mean of the last; ``worst``, the worst seed's last; ``p_above_first``, the probability that a seed of this row
        ends better than one of the first, where ties count half. The last and its 95 % bootstrap interval over seeds
        (``final_low``, ``final_high``, …) need three seeds, and are NaN below. ``attrs`` holds metric and mode.

    Raises:
        UsageError: a path holds no run, the metric is not logged by all, or the extra ``compare`` is not installed.

    Source: Agarwal et al. 2021, arXiv:2108.13264 (IQM, stratified bootstrap, probability of improvement).
    """
    return summarize(with_metric(read_all(runs), metric), metric, mode)


def compare_command(given: Any) -> None:
    """Prints the table of ``rl compare``, and writes its files."""
    results = with_metric(read_all(given.runs), given.metric)
    frame = summarize(results, given.metric, given.mode)
    print(text_of(frame))
    if given.plot is not None:
        plot(results, given.plot, given.metric)
    if given.csv is not None:
        frame.to_csv(given.csv, index=False)


def require_packages() -> None:
    """Raises where the packages of a comparison are missing."""
    if missing := [name for name in ("pandas", "rliable", "matplotlib") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"comparing runs needs {', '.join(missing)}, not installed here: {install('compare')}")


# ---------------------------------------------------------------- reading


def read_all(places: Sequence[str | Path]) -> list[Result]:
    """Reads all runs in some places; of runs with the same settings and seed the last. A line on standard error says
    which of several can't be read.
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
    return list({(x.name, x.seed, str(sorted(x.settings.items()))): x for x in found}.values())


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
    name = _name_of(config, file) if {"model", "data"} <= config.keys() else folder.parent.name
    return Result(name, seed, points, {**own, **trainer}, seconds)


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


# ---------------------------------------------------------------- a table


def summarize(results: Sequence[Result], metric: str | None = None, mode: str | None = None) -> "pd.DataFrame":
    """Returns the table of :func:`compare` for runs that are read."""
    import pandas as pd

    metric = chosen_metric(results, metric)
    mode = mode or ("min" if metric.endswith(("loss", "kl", "perplexity")) else "max")
    if mode not in ("max", "min"):
        raise UsageError(f"mode={mode!r} must be max or min")
    sign = -1.0 if mode == "min" else 1.0
    rows, first = [], None
    for (name, settings), runs in groups(results).items():
        finals = np.array([run.curves[metric][-1][1] for run in runs])
        bests = np.array([sign * max(sign * value for _, value in run.curves[metric]) for run in runs])
        known = [run.seconds for run in runs if run.seconds is not None]
        row: dict[str, Any] = {
            "run": name,
            **dict(settings),
            "seeds": ", ".join(str(run.seed) for run in runs),
            "n": len(runs),
            "steps": int(np.median([_end(run) for run in runs])),
            "seconds": float(np.median(known)) if known else None,
            "worst": sign * (sign * finals).min(),
        }
        for column, values in (("final", finals), ("best", bests)):
            row[column] = values.mean()
            row[f"{column}_low"], row[f"{column}_high"] = interval(values)[1:]
        row["iqm"], row["iqm_low"], row["iqm_high"] = interval(finals, middle=True)
        first = finals if first is None else first
        row["p_above_first"] = probability_above(sign * finals, sign * first)
        rows.append(row)
    frame = pd.DataFrame(rows)
    frame.attrs.update(metric=metric, mode=mode)
    return frame


def with_metric(results: Sequence[Result], metric: str | None) -> list[Result]:
    """Returns the runs that log a metric, by default the one of :data:`METRICS` that most of them log; all if none."""
    named = METRICS if metric is None else (metric,)
    counts = {name: sum(name in run.curves for run in results) for name in named}
    most = max(named, key=counts.__getitem__)
    if not counts[most] or any(count == len(results) for count in counts.values()):
        return list(results)
    leave_out(f"{run.name}, seed {run.seed}, which does not log {most}" for run in results if most not in run.curves)
    return [run for run in results if most in run.curves]


def chosen_metric(results: Sequence[Result], metric: str | None) -> str:
    """Returns the metric by which runs are compared, which all of them log."""
    common = [name for name in results[0].curves if all(name in run.curves for run in results)]
    if metric is None and (known := [name for name in METRICS if name in common]):
        return known[0]
    if metric not in common:
        what = "no metric of learning is" if metric is None else f"metric={metric!r} is not"
        raise UsageError(
            f"{what} logged by all {len(results)} runs{did_you_mean(str(metric), common)}; all log "
            f"{', '.join(common) or 'nothing in common'}"
        )
    return str(metric)


def _end(run: Result) -> int:
    return max(points[-1][0] for points in run.curves.values())


def groups(results: Sequence[Result]) -> dict[tuple[str, tuple], list[Result]]:
    """Returns the runs that differ in their seed alone, by name and by the settings in which others differ."""
    names = dict.fromkeys(name for run in results for name in run.settings if not _SHOWN.fullmatch(name))
    within, between = [], []
    for name in names:
        alike: dict[str, set] = {}
        for run in results:
            alike.setdefault(run.name, set()).add(str(run.settings.get(name)))
        if any(len(values) > 1 for values in alike.values()):
            within.append(name)
        elif len({str(run.settings[name]) for run in results if name in run.settings}) > 1:
            between.append(name)
    differing = within + between
    found: dict[tuple[str, tuple], list[Result]] = {}
    for run in results:
        values = {name: run.settings.get(name) for name in differing}
        settings = tuple((name, x if isinstance(x, int | float | None) else str(x)) for name, x in values.items())
        found.setdefault((run.name, settings), []).append(run)
    return found


def interval(values: np.ndarray, middle: bool = False) -> tuple[Any, Any, Any]:
    """Mean over seeds, with ``middle`` the interquartile mean, and its 95 % bootstrap interval, NaN below three."""
    from scipy.stats import trim_mean

    statistic = (lambda x: trim_mean(x, 0.25)) if middle else (lambda x: x.mean(0))
    point = statistic(values)
    if len(values) < FEWEST:
        nothing = np.full(np.shape(point), np.nan)[()]
        return (nothing if middle else point), nothing, nothing
    from rliable import library

    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002  # rliable takes a random state, and draws from this generator
    # It resamples runs within each task; here is one task.
    tasks = {"runs": values.reshape(len(values), 1, -1)}
    _, found = library.get_interval_estimates(tasks, lambda x: statistic(x[:, 0]), reps=RESAMPLES)
    np.random.set_state(before)  # noqa: NPY002
    low, high = found["runs"].reshape(2, *np.shape(point))
    return point, low, high


def probability_above(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the probability that a seed of ours ends above one of theirs; NaN below three seeds."""
    if min(len(ours), len(theirs)) < FEWEST:
        return float("nan")
    from rliable.metrics import probability_of_improvement

    return float(probability_of_improvement(ours[:, None], theirs[:, None]))


def text_of(frame: "pd.DataFrame", most: int = 6) -> str:
    """Returns the table as people read it; of the settings that differ, the first ``most``."""
    own = list(frame.columns[1 : frame.columns.get_loc("seeds")])
    given = frame[["run", *own[:most]]].astype(object)
    table = given.where(frame.notna(), "–").map(shown).rename(columns=shown)
    table["seeds"] = [str(n) if n > 1 else f"1 ({seeds})" for n, seeds in zip(frame["n"], frame["seeds"], strict=True)]
    for column in ("final", "best", "iqm"):
        table[column] = [
            _with_interval(*values)
            for values in frame[[column, f"{column}_low", f"{column}_high"]].itertuples(index=False)
        ]
    if len(frame) > 1:
        table["P(above 1st)"] = [f"{x:.2f}" if x == x else "–" for x in frame["p_above_first"]]
    table["steps"] = [f"{x:,}" for x in frame["steps"]]
    table["time"] = [f"{x:.1f} s" if x == x and x is not None else "–" for x in frame["seconds"]]
    better = "lower" if frame.attrs["mode"] == "min" else "higher"
    lines = [
        f"{shown(frame.attrs['metric'])}, {better} is better; mean over seeds "
        f"[95 % bootstrap interval, from {FEWEST} seeds]"
    ]
    rows = [list(table.columns), *table.values.tolist()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if more := own[most:]:
        lines.append(f"{len(more)} more settings differ, which --csv has: {shown(', '.join(more), 300)}")
    return "\n".join(lines)


def _with_interval(value: float, low: float, high: float) -> str:
    return "–" if value != value else f"{value:.4g} [{low:.4g}, {high:.4g}]" if low == low else f"{value:.4g}"


# ---------------------------------------------------------------- a plot


def plot(
    results: Sequence[Result],
    file: str | Path,
    metric: str | None = None,
    curve: str | None = None,
    target: float | None = None,
    dpi: int = 120,
) -> None:
    """Draws curves on one axis: mean over seeds, its 95 % bootstrap interval, every seed as a thin line.

    A metric of few points is drawn by its training ``curve``, with dots at the last; ``target`` is a dashed line.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    judged = chosen_metric(results, metric)
    drawn = curve or (DRAWN.get(judged, judged) if metric is None else judged)
    drawn = drawn if all(drawn in run.curves for run in results) else judged
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    rows = groups(results)
    for i, ((name, settings), runs) in enumerate(rows.items()):
        steps, values = on_one_axis([run.curves[drawn] for run in runs])
        mean, low, high = interval(values)
        for run in runs if len(runs) > 1 else []:
            axes.plot(*zip(*run.curves[drawn], strict=True), color=f"C{i}", alpha=0.25, linewidth=0.7)
        axes.fill_between(steps, low, high, color=f"C{i}", alpha=0.25, linewidth=0)
        finals = np.array([run.curves[judged][-1][1] for run in runs])
        iqm, low_, high_ = interval(finals, middle=True)
        own = [
            f"{key}={value}"
            for key, value in settings
            if len({str(dict(others)[key]) for other, others in rows if other == name}) > 1
        ]
        label = ", ".join([name, *own])
        label += f" ({len(runs)} seed{'s' if len(runs) > 1 else ''}"
        label += f", IQM {_with_interval(iqm, low_, high_)})" if len(runs) >= FEWEST else ")"
        label = shown(label, 200).replace("$", r"\$")
        axes.plot(steps, mean, color=f"C{i}", label=label, marker="." if len(steps) <= 10 else None)
        if drawn != judged:
            axes.scatter([_end(run) for run in runs], finals, color=f"C{i}", s=9, zorder=3)
    in_control = drawn.startswith("rollout/") or any("rollout/ep_rew_mean" in run.curves for run in results)
    axes.set(xlabel="transitions" if in_control else "optimizer steps", ylabel=shown(drawn).replace("$", r"\$"))
    if target is not None:
        axes.axhline(target, color="gray", linestyle="--", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside lower center", fontsize="small")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=dpi)


def on_one_axis(curves: Sequence[Sequence[tuple[int, float]]], points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates curves linearly at steps that all of them reach, [P], to [curves, P]."""
    arrays = [np.array(curve, float).T for curve in curves]
    first, last = max(x[0, 0] for x in arrays), min(x[0, -1] for x in arrays)
    known = np.unique(np.concatenate([x[0] for x in arrays]))
    steps = known[(known >= first) & (known <= last)]
    steps = np.linspace(first, last, points) if len(steps) > points else steps
    return steps, np.array([np.interp(steps, *x) for x in arrays])
