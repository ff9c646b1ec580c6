"""The table of results: every row a config, several seeds, a target.

    python -m benchmarks.results run ppo/cartpole a2c/cartpole --seeds 5 --jobs 2
    python -m benchmarks.results keep r1 runs/r1
    python -m benchmarks.results report

``run`` trains each seed with ``rl fit`` in a process of its own, as a person would, and keeps its final evaluation and
curve as ``benchmarks/results/<row>/<seed>.json``; what is there already is not run again, and a run that was stopped
resumes from its checkpoint in ``runs/results/<row>/<seed>``. A row's ``settings.yaml`` holds those of its stored seeds:
a config that has others since is not run beside them. ``keep`` takes over table and curves of a pipeline
(``python -m recipes.r1``, ``recipes.rlhf``) that has run in a folder. ``report`` writes ``docs/results.md``, results
on each algorithm's page and the plots from those files, with the statistics and the plot of ``rl compare``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from recipes import compared_runs, comparison, configs

STORE = Path(__file__).parent / "results"
#: Folder of a run's checkpoints until its result is stored.
RUNS = Path(__file__).parent.parent / "runs" / "results"
DOCS = Path(__file__).parent.parent / "docs"
#: Folder in a row's where ``benchmarks.peers`` keeps the runs of Stable-Baselines3.
PEER = "stable-baselines3"
#: Marks around the results on an algorithm's page.
BEGIN, END = "<!-- results: written by `python -m benchmarks.results report` -->\n", "<!-- end of results -->\n"
#: Algorithms that share a page, by their folders of configs; the others have one of their own.
SHARED_PAGES = {**dict.fromkeys(("monte_carlo", "sarsa", "q_learning"), "tabular"), "ddpg": "td3"}
#: Chosen while looking at runs of seeds 0 to 5; such rows report seeds from 100.
BY_HAND = "by hand, on seeds 0 to 5"
FROM_1000 = "by hand, on seeds from 1000"
#: The same after runs of seeds 0 to 4 with other settings; such rows report seeds from 100.
AGAIN = "by hand, on seeds 0 to 4 and from 1000"
#: Chosen anew after runs of seeds up to 106 fell short; such rows report seeds from 200.
ANEW = "by hand, on seeds up to 106 and from 1000"
#: The same by a search; 101 to 109 had been looked at.
SWEPT = "`rl sweep`: 27 trials of 3 seeds from 1000, four of the best again on seeds from 1100"


@dataclass(frozen=True)
class Row:
    """One line of the table: ``config`` trained, ``tag`` read at the end, compared with ``target``.

    ``chosen`` says how this project chose the settings, where they are not a source's: seeds that were looked at then
    are not reported.
    """

    config: str
    target: float | None
    tag: str = "test/mean_reward"
    curve: str = "rollout/ep_rew_mean"
    chosen: str = ""

    @property
    def first_seed(self) -> int:
        """The first reported seed."""
        return {BY_HAND: 100, AGAIN: 100, ANEW: 200, SWEPT: 200}.get(self.chosen, 0)

    @property
    def algorithm(self) -> str:
        """The config's folder."""
        return self.config.partition("/")[0]

    @property
    def page(self) -> str:
        """Name of its algorithm's page."""
        return SHARED_PAGES.get(self.algorithm, self.algorithm)

    @property
    def picture(self) -> str:
        """File name of its learning curve."""
        return self.config.replace("/", "_") + ".png"


def _exact(config: str, target: float, chosen: str = BY_HAND) -> Row:
    """Returns a tabular row: the greedy policy's true expected return, by dynamic programming."""
    return Row(config, target, "eval/true_return", "eval/true_return", chosen)


ROWS = {
    row.config: row
    for row in (
        _exact("monte_carlo/maze", 10.0, ANEW),
        _exact("sarsa/maze", 10.0),
        _exact("q_learning/maze", 10.0),
        _exact("monte_carlo/frozenlake", 0.99 * 0.7442),
        _exact("sarsa/frozenlake", 0.99 * 0.7442),
        _exact("q_learning/frozenlake", 0.99 * 0.7442),
        _exact("q_learning/taxi", 0.99 * 7.93),
        _exact("q_learning/cliffwalking", -13.0),
        _exact("sarsa/cliffwalking", -17.0),
        _exact("sarsa/cliffwalking_decay", -13.0),
        Row("dqn/cartpole", 475, chosen=BY_HAND),
        Row("dqn/mountaincar", -110, chosen=BY_HAND),
        Row("dqn/lunarlander", 154),
        Row("dqn/acrobot", -76.6),
        Row("dqn/bit_flipping", -7, chosen=BY_HAND),
        Row("qrdqn/cartpole", 490),
        Row("qrdqn/acrobot", -75),
        Row("qrdqn/mountaincar", -106, chosen=AGAIN),
        Row("c51/cartpole", 490, chosen=FROM_1000),
        Row("c51/lunarlander_rainbow", 154),
        Row("pqn/cartpole", 490, chosen=FROM_1000),
        Row("reinforce/cartpole", 450, chosen=BY_HAND),
        Row("a2c/cartpole", 490),
        Row("a2c/acrobot", -85),
        Row("a2c/mountaincar", -111.3),
        Row("a2c/lunarlander", 155.8),
        Row("a2c/pendulum", -163),
        Row("trpo/cartpole", 490, chosen=BY_HAND),
        Row("trpo/acrobot", -85),
        Row("trpo/lunarlander", 133, chosen=SWEPT),
        Row("trpo/lunarlander_continuous", 262.4),
        Row("trpo/bipedalwalker", 182.3),
        Row("ppo/cartpole", 490),
        Row("ppo/acrobot", -80),
        Row("ppo/mountaincar", -115),
        Row("ppo/lunarlander", 240),
        Row("ppo/lunarlander_continuous", 270.9),
        Row("ppo/pendulum", -200, chosen=BY_HAND),
        Row("ppo/cartpole_penalty", 490),
        Row("ppo/lunarlander_penalty", 200),
        Row("ppo/invalid_actions", 90, chosen=BY_HAND),
        Row("recurrent_ppo/cartpole_no_velocity", 490, chosen=BY_HAND),
        Row("recurrent_ppo/pendulum_no_velocity", -230, chosen=ANEW),
        Row("ppo/halfcheetah", None),
        Row("ppo/hopper", None),
        Row("ppo/walker2d", 3_479),
        Row("trpo/halfcheetah", None),
        Row("trpo/hopper", None),
        Row("trpo/walker2d", 4_502),
        Row("ddpg/pendulum", -160),
        Row("td3/pendulum", -160),
        Row("td3/halfcheetah", 9_600),
        Row("td3/hopper", 3_100),
        Row("td3/walker2d", 4_718),
        Row("sac/pendulum", -160),
        Row("sac/lunarlander_continuous", 260),
        Row("sac/mountaincar_continuous", 94.5),
        Row("sac/bipedalwalker", 290),
        Row("sac/halfcheetah", 9_500),
        Row("sac/hopper", 2_300),
        Row("sac/walker2d", 3_863),
        Row("tqc/pendulum", -155),
        Row("crossq/pendulum", None),
        Row("tqc/halfcheetah", 12_000),
        Row("tqc/hopper", 3_700),
    )
}


# -------------------------------------------------------------------- running


def settings(text: str) -> dict:
    """Returns the settings on which a config's results depend: all except the device."""
    content = yaml.safe_load(text)
    trainer = {name: value for name, value in content.get("trainer", {}).items() if name != "accelerator"}
    return {**content, "trainer": trainer}


def check_settings(row: Row) -> None:
    """Raises an error if a row's stored seeds were trained with settings that differ from its config."""
    stored = STORE / row.config / "settings.yaml"
    if stored.exists() and settings(stored.read_text("utf-8")) != settings(configs.text(row.config)):
        raise RuntimeError(f"{stored.parent} holds runs of other settings than configs/{row.config}.yaml has; remove "
                           "that folder to run the row anew")  # fmt: skip


def run_seed(row: Row, seed: int, threads: int = 1) -> str:
    """Trains one seed on ``threads`` cores and stores its result; returns a line about it."""
    check_settings(row)
    path = STORE / row.config / f"{seed}.json"
    if path.exists():
        return f"{row.config} seed {seed}: there already"
    text = configs.text(row.config)
    folder = RUNS / row.config / str(seed)
    resumed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "recipes", "fit", "--config", f"{row.config}.yaml", "--seed_everything", str(seed),
               "--data.n_test_episodes", "100", "--threads", str(threads), "--resume"]  # fmt: skip
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MPLBACKEND": "Agg"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, environment.get("PYTHONPATH")) if p)
    start_s = time.perf_counter()
    with open(folder / "errors.txt", "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s, cpu_s = time.perf_counter() - start_s, usage.ru_utime + usage.ru_stime
    if process.returncode:
        raise RuntimeError(f"{row.config} seed {seed} failed:\n{(folder / 'errors.txt').read_text()[-2000:]}")
    result = read_run(next(folder.glob("logs/*/version_0")), row)
    # The time before a kill is not known, and the table shows the time on one core.
    took = {} if resumed or threads > 1 else {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"seed": seed, **took, **result}), encoding="utf-8")
    path.with_name("settings.yaml").write_text(text, encoding="utf-8")
    shutil.rmtree(folder)
    return f"{row.config} seed {seed}: {result['final']:.2f} in {wall_s:.0f} s, {cpu_s:.0f} s of them computing"


def read_run(folder: Path, row: Row) -> dict:
    """Final value, transitions and curve (at most 200 points) of a run's folder."""
    curves = compared_runs.read(folder).curves
    curve = [(step, round(value, 4)) for step, value in curves[row.curve]]
    keep = np.unique(np.linspace(0, len(curve) - 1, 200).astype(int))
    return {
        "final": curves[row.tag][-1][1],
        "total_timesteps": curves["test/mean_reward"][-1][0],
        "curve": [curve[i] for i in keep],
    }


# -------------------------------------------------------------------- reporting


def load(row: Row) -> list[dict]:
    """Returns the stored seeds of a row, from its first one on."""
    files = sorted((STORE / row.config).glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files if int(path.stem) >= row.first_seed]


def as_results(row: Row, runs: list[dict]) -> list[compared_runs.Result]:
    """Returns stored seeds as ``rl compare`` reads runs; the final evaluation is a metric of its own."""
    return [
        compared_runs.Result(
            row.config, run["seed"],
            {row.curve: run["curve"], f"final {row.tag}": [(run["total_timesteps"], run["final"])]},
            {}, run.get("cpu_s"),
        )
        for run in runs
    ]  # fmt: skip


def report(where: str) -> None:
    """Writes ``docs/results.md``, the results of every algorithm's page, and one plot per row."""
    stored = {row: runs for row in ROWS.values() if (runs := load(row))}
    for row, runs in stored.items():
        comparison.plot(
            as_results(row, runs), DOCS / "plots" / row.picture, f"final {row.tag}", row.curve, row.target, 70
        )
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.results report` from the runs in `benchmarks/results/`; `python -m",
        "benchmarks.results run <row> --seeds 5` repeats a row. Each final policy plays 100 deterministic episodes on",
        "seeds outside training; the table shows the interquartile mean (IQM) over seeds with a 95 % bootstrap",
        "interval, both from three seeds on, as `rl compare` does. Tabular rows show the greedy policy's exact",
        "expected return. Time is that of the whole `rl fit`, from the start of the process to the summary, on one",
        f"core of {where}, with other work: processor time (—: not recorded). `target` is set in",
        "`benchmarks/results.py`, and `met by` counts the seeds that reach it. `source's` settings are those of the",
        "source in the config's header, with the changes that it names. Rows whose settings this project chose, by",
        "hand or by a sweep, report other seeds than those that they were chosen on.",
        "",
        *table(stored, ".."),
    ]
    if missing := [f"{row.config} (target {row.target})" for row in ROWS.values() if row.target and row not in stored]:
        lines += ["", f"These rows have a target and no result yet: {', '.join(missing)}."]
    lines += beside_peers(stored)
    lines += [
        "",
        "## Learning curves",
        "",
        "Each plot shows the return of the last 100 training episodes (tabular: exact return of the greedy policy) as",
        "mean over seeds with a 95 % bootstrap interval, and every seed as a thin line. Dots are final evaluations",
        "without exploration, and the dashed line is their target.",
        "",
        *pictures(stored, "."),
    ]
    for pipeline in sorted((STORE / "pipelines").glob("*.md")):
        lines += ["", f"## Pipeline {pipeline.stem}", "", *pipeline.read_text(encoding="utf-8").splitlines(), ""]
        lines += [f"![curves of {pipeline.stem}](plots/pipeline_{pipeline.stem}.png)"]
    (DOCS / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for page in sorted(DOCS / "algorithms" / f"{name}.md" for name in {row.page for row in ROWS.values()}):
        write_page(page, {row: runs for row, runs in stored.items() if row.page == page.stem})


def table(stored: dict[Row, list[dict]], root: str) -> list[str]:
    """Lines of Markdown, a row each; ``root`` leads from the page to the repository."""
    lines = [
        "| row | settings chosen | transitions | seeds | IQM | 95 % interval | worst seed | target | met by | time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, runs in stored.items():
        finals = np.array([run["final"] for run in runs])
        (whole,) = comparison.summarize(as_results(row, runs), f"final {row.tag}").to_dict("records")
        met = "" if row.target is None else f"{int((finals >= row.target - 1e-6).sum())} of {len(runs)}"
        target = "" if row.target is None else f"{row.target:.4g}"
        walls = [run["wall_s"] for run in runs if "wall_s" in run]
        timed = whole["seconds"]
        took = f"{timed:.0f} s" if timed is not None else f"≤ {min(walls):.0f} s" if walls else "—"
        cells = [f"[{row.config}]({root}/configs/{row.config}.yaml)", row.chosen or "source's",
                 f"{runs[0]['total_timesteps']:,}", str(len(runs)),
                 *middle(whole["iqm"], whole["iqm_low"], whole["iqm_high"]), f"{whole['worst']:.2f}",
                 target, met,
                 took]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def beside_peers(stored: dict[Row, list[dict]]) -> list[str]:
    """Lines of Markdown: rows that ``benchmarks.peers`` has trained too, ours and theirs."""
    lines = []
    for row, runs in stored.items():
        theirs = [json.loads(path.read_text(encoding="utf-8")) for path in (STORE / row.config / PEER).glob("*.json")]
        if not theirs:
            continue
        both = [np.array([run["final"] for run in some]) for some in (runs, theirs)]
        cells = [" | ".join([str(len(finals)), *middle(*comparison.interval(finals, middle=True))]) for finals in both]
        above = comparison.probability_above(*both)
        versions = ", ".join(sorted({run["version"] for run in theirs}))
        name = f"[{row.config}](../configs/{row.config}.yaml)"
        target = "" if row.target is None else f"{row.target:.4g}"
        chance = f"{above:.2f}" if above == above else "—"
        lines.append(f"| {' | '.join((name, target, *cells, chance, versions))} |")
    if not lines:
        return []
    return [
        "",
        "## Beside Stable-Baselines3",
        "",
        "`python -m benchmarks.peers <row> --seeds 10` trains the algorithm of Stable-Baselines3 or sb3-contrib with",
        "the config's settings for as many transitions, and plays 100 deterministic episodes. A published target is",
        "often one run, in an earlier version of the environment. P(above) is the probability that a seed here ends",
        "above a seed there, where ties count half; 0.5 is no difference.",
        "",
        "| row | target | seeds here | IQM | 95 % interval | seeds there | IQM | 95 % interval | P(above) | versions |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def middle(iqm: float, low: float, high: float) -> tuple[str, str]:
    """Returns an interquartile mean and its interval as text; below three seeds there is none."""
    return (f"{iqm:.2f}", f"{low:.2f} … {high:.2f}") if iqm == iqm else ("—", "—")


def pictures(stored: dict[Row, list[dict]], docs: str) -> list[str]:
    """Lines of Markdown, a plot each; ``docs`` leads from the page to the documentation's folder."""
    return [f"![learning curve of {row.config}]({docs}/plots/{row.picture})" for row in stored]


def write_page(page: Path, stored: dict[Row, list[dict]]) -> None:
    """Writes an algorithm's results between the two marks at the end of its page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RuntimeError(f"{page} has no place for results: it needs the lines {BEGIN!r} and {END!r}")
    lines = ["", *table(stored, "../.."), "", "[Results](../results.md) explains the columns and curves.", "",
             *pictures(stored, ".."), ""]  # fmt: skip
    page.write_text(before + begin + "\n".join(lines) + end + after, encoding="utf-8")


def keep(name: str, folder: Path) -> None:
    """Copies a pipeline's table and curves from its folder.

    Args:
        name: of the pipeline, a heading of the report.
        folder: where it ran.
    """
    command = f"`python -m recipes.{name.partition('_')[0]}`, whose curves over the optimizer step, stage after stage:"
    (STORE / "pipelines").mkdir(parents=True, exist_ok=True)
    table = (folder / "results.md").read_text(encoding="utf-8").strip()
    (STORE / "pipelines" / f"{name}.md").write_text(f"{table}\n\n{command}\n", encoding="utf-8")
    shutil.copy(folder / "curves.png", DOCS / "plots" / f"pipeline_{name}.png")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train rows that are not stored yet")
    run.add_argument("rows", nargs="*", metavar="ROW", help=f"none for all, or of {', '.join(ROWS)}")
    run.add_argument(
        "--seeds", type=int, default=5, help="from the row's first one on: 0, or where chosen by hand 100 or 200"
    )
    run.add_argument("--jobs", type=int, default=2, help="runs side by side")
    run.add_argument("--threads", type=int, default=1, help="cores of each run; more pay from networks of 256×256 on")
    keeper = commands.add_parser("keep", help="take over table and curves of a pipeline's folder")
    keeper.add_argument("name", help="of the pipeline: r1, rlhf, or with a suffix after _")
    keeper.add_argument("folder", type=Path)
    reporter = commands.add_parser("report", help="write docs/results.md from what is stored")
    reporter.add_argument("--where", default="a machine with two", help="the machine, for the text")
    args = parser.parse_args()
    if args.command == "report":
        report(args.where)
        return
    if args.command == "keep":
        keep(args.name, args.folder)
        return
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        parser.error(f"unknown row {unknown[0]!r}; the rows are {', '.join(ROWS)}")
    rows = [ROWS[name] for name in args.rows or ROWS]
    work = [(row, row.first_seed + seed) for seed in range(args.seeds) for row in rows]
    failed = False
    with ThreadPoolExecutor(args.jobs) as pool:
        for finished in [pool.submit(run_seed, *item, args.threads) for item in work]:
            try:
                print(finished.result(), flush=True)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
