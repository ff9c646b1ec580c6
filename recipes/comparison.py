"""Runs side by side: what differs in their settings, what they reached over seeds, and their curves on one axis."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import datamodules
import rl_modules
from recipes.compared_runs import Result, leave_out, read_all
from recipes.run_files import shown
from rl_modules.common.errors import UsageError, did_you_mean

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
#: Unfinished runs that are named.
MOST_UNFINISHED = 5
#: Settings that a run's name or the column of seeds shows, or that say where it ran.
_SHOWN = re.compile(r"seed|env_id|trainer\.(accelerator|devices|default_root_dir|enable_progress_bar)")


#: Settings that change the course of a run or its display, and nothing that is learned.
_ASIDE = re.compile(
    r"(n_)?(eval|test)_.*|n_(eval|test)_episodes|log_every|stats_window_size|record_every|vectorization_mode"
    r"|trainer\.(enable|log_|max_time|num_sanity|check_val|val_check|limit_(val|test|predict)|profiler|benchmark).*"
)


def compare(*runs: str | Path, metric: str | None = None, mode: str | None = None) -> "pd.DataFrame":
    """Compares runs: a row for runs that differ in their seed alone, the rows of a task together.

    Args:
        *runs: folders of runs, folders with runs below them such as a sweep's, and patterns such as ``logs/*/*``.
        metric: by which they are compared; None: for each task the first of :data:`METRICS` that all its runs log.
        mode: ``max`` or ``min``, the direction in which the metric improves; None: ``min`` for a loss, else ``max``.

    Returns:
        Columns: ``task`` (environment or data), ``metric``, ``run``; every setting that differs; ``seeds`` and ``n``,
        their number; ``unfinished``, how many of them are not known to have come to their end; ``steps`` and
        ``seconds``, the median; ``final`` and ``best``, the mean over seeds of the last and the best value, where an
        evaluation before the first step does not count; ``iqm``, the interquartile mean of the last; ``worst``, the
        worst seed's last; ``p_above_first``, the probability that a seed of this row ends better than one of the task's
        first, where ties count half. The last and its 95 % bootstrap interval over seeds (``final_low``,
        ``final_high``, …) need three seeds, and are NaN below. ``attrs`` holds the first task's metric and mode.

    Raises:
        UsageError: a path holds no run, the metric is not logged by all, or the extra ``compare`` is not installed.

    Source: Agarwal et al. 2021, arXiv:2108.13264 (IQM, stratified bootstrap, probability of improvement).
    """
    return _together([summarize(results, metric, mode) for results in by_task(read_all(runs), metric)])


def _together(tables: Sequence["pd.DataFrame"]) -> "pd.DataFrame":
    import pandas as pd

    frame = pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]
    frame.attrs.update(tables[0].attrs)
    return frame


def compare_command(given: Any) -> None:
    """Prints the tables of ``rl compare``, and writes its files."""
    tasks = by_task(read_all(given.runs), given.metric)
    tables = [summarize(results, given.metric, given.mode) for results in tasks]
    print("\n\n".join(text_of(table, results) for table, results in zip(tables, tasks, strict=True)))
    if given.plot is not None:
        plot_tasks(tasks, given.plot, given.metric)
    if given.csv is not None:
        _together(tables).to_csv(given.csv, index=False)


# ---------------------------------------------------------------- a table


def by_task(results: Sequence[Result], metric: str | None) -> list[list[Result]]:
    """Returns the runs of each environment or data set that log the metric; lines say which are left out."""
    tasks: dict[str, list[Result]] = {}
    for run in results:
        tasks.setdefault(run.task, []).append(run)
    found = [with_metric(runs, metric) for runs in tasks.values()]
    comparable = [runs for runs in found if _common(runs, metric)]
    if not comparable:
        return found[:1]  # `chosen_metric` says what is wrong
    other = metric or "a metric of learning after the first step"
    leave_out(f"{run.title}, which does not log {other}" for runs in found if runs not in comparable for run in runs)
    return comparable


def _common(results: Sequence[Result], metric: str | None) -> list[str]:
    """The metrics by which runs can be compared: a given one, or those of :data:`METRICS`, which all of them log."""
    return [name for name in ([metric] if metric else METRICS) if all(run.values(name) for run in results)]


def summarize(results: Sequence[Result], metric: str | None = None, mode: str | None = None) -> "pd.DataFrame":
    """Returns the table of :func:`compare` for runs of one task."""
    import pandas as pd

    metric = chosen_metric(results, metric)
    mode = mode or ("min" if metric.endswith(("loss", "kl", "perplexity")) else "max")
    if mode not in ("max", "min"):
        raise UsageError(f"mode={mode!r} must be max or min")
    sign = -1.0 if mode == "min" else 1.0
    rows, first = [], None
    for (name, settings), runs in groups(results).items():
        finals = np.array([run.values(metric)[-1][1] for run in runs])
        bests = np.array([sign * max(sign * value for _, value in run.values(metric)) for run in runs])
        known = [run.seconds for run in runs if run.seconds is not None]
        row: dict[str, Any] = {
            "task": runs[0].task,
            "metric": metric,
            "run": name,
            **dict(settings),
            "seeds": ", ".join(str(run.seed) for run in runs),
            "n": len(runs),
            "unfinished": sum(not run.ended for run in runs),
            "steps": int(np.median([run.last_step for run in runs])),
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
    counts = {name: sum(bool(run.values(name)) for run in results) for name in named}
    most = max(named, key=counts.__getitem__)
    if not counts[most] or any(count == len(results) for count in counts.values()):
        return list(results)
    leave_out(f"{run.title}, which {_lacks(run, most)}" for run in results if not run.values(most))
    return [run for run in results if run.values(most)]


def _lacks(run: Result, metric: str) -> str:
    return f"has {metric} from before its first step alone" if metric in run.curves else f"does not log {metric}"


def chosen_metric(results: Sequence[Result], metric: str | None) -> str:
    """Returns the metric by which runs are compared, which all of them log."""
    if known := _common(results, metric):
        return known[0]
    common = [name for name in results[0].curves if all(run.values(name) for run in results)]
    what = "no metric of learning is" if metric is None else f"metric={metric!r} is not"
    raise UsageError(
        f"{what} logged by all {len(results)} runs{did_you_mean(str(metric), common)}; all log "
        f"{', '.join(common) or 'nothing in common'}"
    )


def groups(results: Sequence[Result]) -> dict[tuple[str, tuple], list[Result]]:
    """Returns the runs that differ in their seed alone, by name and by the settings in which others differ.

    First are the settings in which runs of one algorithm differ, then those that have another value than an algorithm's
    default, then defaults of two algorithms, and last those that change nothing that is learned.
    """
    names = dict.fromkeys(name for run in results for name in run.settings if not _SHOWN.fullmatch(name))
    ranks: dict[str, tuple[bool, int]] = {}
    for name in names:
        alike: dict[str, set] = {}
        for run in results:
            alike.setdefault(run.name, set()).add(str(run.settings.get(name)))
        if any(len(values) > 1 for values in alike.values()):
            ranks[name] = bool(_ASIDE.fullmatch(name)), 0
        elif len({str(run.settings[name]) for run in results if name in run.settings}) > 1:
            ranks[name] = bool(_ASIDE.fullmatch(name)), 1 if any(_is_changed(run, name) for run in results) else 2
    found: dict[tuple[str, tuple], list[Result]] = {}
    for run in results:
        values = {name: run.settings.get(name) for name in sorted(ranks, key=ranks.__getitem__)}
        settings = tuple((name, x if isinstance(x, int | float | None) else str(x)) for name, x in values.items())
        found.setdefault((run.name, settings), []).append(run)
    return found


def _is_changed(run: Result, name: str) -> bool:
    """Whether a run of a control algorithm has another value than the default."""
    algorithm = run.name.partition("-")[0]
    if name not in run.settings or algorithm not in rl_modules.CONTROL:
        return False
    module = getattr(rl_modules, algorithm)
    replays = module.experience.kind == "replay"
    data = datamodules.ReplayDataModule if replays else datamodules.RolloutDataModule
    declared = {**data.declared_settings, **module.declared_settings}
    return name in declared and str(run.settings[name]) != str(declared[name].default)


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


def text_of(frame: "pd.DataFrame", results: Sequence[Result], most: int = 6) -> str:
    """Returns a task's table as people read it; of the settings that differ, the first ``most``."""
    begin = frame.columns.get_loc("run")
    own = list(frame.columns[begin + 1 : frame.columns.get_loc("seeds")])
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
    if frame["unfinished"].any():
        table["unfinished"] = [
            f"{k} of {n}" if k else "–" for k, n in zip(frame["unfinished"], frame["n"], strict=True)
        ]
    better = "lower" if frame.attrs["mode"] == "min" else "higher"
    lines = [
        f"{shown(results[0].task)}: {shown(frame.attrs['metric'])}, {better} is better; mean over seeds "
        f"[95 % bootstrap interval, from {FEWEST} seeds]"
    ]
    rows = [list(table.columns), *table.values.tolist()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if more := own[most:]:
        lines.append(f"{len(more)} more settings differ, which --csv has: {shown(', '.join(more), 300)}")
    unfinished = [run for run in results if not run.ended]
    lines += [f"unfinished: {shown(run.title, 200)}, {_progress_of(run)}" for run in unfinished[:MOST_UNFINISHED]]
    if len(unfinished) > MOST_UNFINISHED:
        lines.append(f"unfinished: {len(unfinished) - MOST_UNFINISHED} more")
    return "\n".join(lines)


def _progress_of(run: Result) -> str:
    if run.wanted is not None:
        return f"at {run.last_step:,} of {run.wanted:,} steps"
    return f"at {run.last_step:,} steps" + (
        "" if run.ended is False else "; its folder does not say whether that is its end"
    )


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
    """Draws the runs of one task, see :func:`plot_tasks`."""
    plot_tasks([results], file, metric, curve, target, dpi)


def plot_tasks(
    tasks: Sequence[Sequence[Result]],
    file: str | Path,
    metric: str | None = None,
    curve: str | None = None,
    target: float | None = None,
    dpi: int = 120,
) -> None:
    """Draws a panel per task: mean over seeds, its 95 % bootstrap interval, every seed as a thin line.

    A metric of few points is drawn by its training ``curve``, with dots at the last; ``target`` is a dashed line.
    """
    from matplotlib.figure import Figure

    columns = min(len(tasks), 3)
    height = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(6.4 * columns, 4 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).flatten()
    for axes, results in zip(panels, tasks, strict=False):
        draw(axes, results, metric, curve, target)
        if len(tasks) > 1:
            axes.set_title(shown(results[0].task).replace("$", r"\$"))
            axes.legend(fontsize="small")
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    if len(tasks) == 1:
        figure.legend(loc="outside lower center", fontsize="small")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=dpi)


def draw(axes: Any, results: Sequence[Result], metric: str | None, curve: str | None, target: float | None) -> None:
    """Draws the runs of one task into a panel."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    judged = chosen_metric(results, metric)
    drawn = curve or (DRAWN.get(judged, judged) if metric is None else judged)
    drawn = drawn if all(drawn in run.curves for run in results) else judged
    rows = groups(results)
    for i, ((name, settings), runs) in enumerate(rows.items()):
        steps, values = on_one_axis([run.curves[drawn] for run in runs])
        mean, low, high = interval(values)
        for run in runs if len(runs) > 1 else []:
            axes.plot(*zip(*run.curves[drawn], strict=True), color=f"C{i}", alpha=0.25, linewidth=0.7)
        axes.fill_between(steps, low, high, color=f"C{i}", alpha=0.25, linewidth=0)
        finals = np.array([run.values(judged)[-1][1] for run in runs])
        iqm, low_, high_ = interval(finals, middle=True)
        own = [
            f"{key}={value}"
            for key, value in settings
            if len({str(dict(others)[key]) for other, others in rows if other == name}) > 1
        ]
        label = ", ".join([name, *own])
        label += f" ({len(runs)} seed{'s' if len(runs) > 1 else ''}"
        if unfinished := sum(run.ended is False for run in runs):
            label += f", {unfinished} unfinished"
        label += f", IQM {_with_interval(iqm, low_, high_)})" if len(runs) >= FEWEST else ")"
        label = shown(label, 200).replace("$", r"\$")
        axes.plot(steps, mean, color=f"C{i}", label=label, marker="." if len(steps) <= 10 else None)
        if drawn != judged:
            axes.scatter([run.last_step for run in runs], finals, color=f"C{i}", s=9, zorder=3)
    in_control = drawn.startswith("rollout/") or any("rollout/ep_rew_mean" in run.curves for run in results)
    axes.set(xlabel="transitions" if in_control else "optimizer steps", ylabel=shown(drawn).replace("$", r"\$"))
    if target is not None:
        axes.axhline(target, color="gray", linestyle="--", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def on_one_axis(curves: Sequence[Sequence[tuple[int, float]]], points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates curves linearly at steps that all of them reach, [P], to [curves, P]."""
    arrays = [np.array(curve, float).T for curve in curves]
    first, last = max(x[0, 0] for x in arrays), min(x[0, -1] for x in arrays)
    known = np.unique(np.concatenate([x[0] for x in arrays]))
    steps = known[(known >= first) & (known <= last)]
    steps = np.linspace(first, last, points) if len(steps) > points else steps
    return steps, np.array([np.interp(steps, *x) for x in arrays])
