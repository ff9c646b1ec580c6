"""``rl sweep``: searches settings with Optuna. Every trial is one or several runs of ``rl fit``."""

import fcntl
import shlex
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes import configs
from recipes.cli.options import ALONE, of_group, unknown_option
from recipes.cli.sweep_file import Sweep, read
from recipes.cli.sweep_trials import (
    FAILURES,
    Judge,
    Pruned,
    best_trials,
    locked,
    open_study,
    remove_checkpoints,
    run_once,
    write_hparams,
)
from recipes.pipeline import checked
from recipes.run import LOGS
from rl_modules.common.errors import UsageError

#: Failed trials after which a sweep without a single result stops.
MOST_FAILURES = 3


def sweep_command(words: list[str]) -> None:
    """Runs or resumes the sweep that ``words`` name: its file, and arguments for all runs."""
    if not words or words[0].startswith("-"):
        raise UsageError(
            "sweep takes a file or a config, as in `rl sweep ppo/cartpole.yaml --n_trials 50`; got "
            f"{' '.join(words) or 'none'}"
        )
    sweep = read(words[0], words[1:])
    check(sweep)
    folder = Path(LOGS) / f"sweep-{sweep.name}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "begin.lock", wait=True):
        study = open_study(sweep, folder)
    print(
        f"sweep of {', '.join(sweep.search)} in {folder}: {_finished(study)} of {sweep.n_trials} trials done",
        flush=True,
    )
    resume_trials(sweep, study, folder)
    while len(study.get_trials(deepcopy=False)) < sweep.n_trials:
        # No other process begins a trial between the count and `ask`, nor takes this one before it is locked.
        with (folder / "begin.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if len(study.get_trials(deepcopy=False)) >= sweep.n_trials:
                break
            trial = study.ask()
            lock = (folder / f"trial_{trial.number:04}.lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with lock:
            run_trial(sweep, study, trial, folder)
    if sweep.finalists:
        # Which trials are the best is known once those of the other processes have ended.
        resume_trials(sweep, study, folder, wait=True)
    finals = run_finals(sweep, study, folder)
    if not best_trials(sweep, study, 1):
        raise UsageError("no trial of the sweep has a result; what each one said is above")
    print("\n".join(_report(sweep, study, folder, finals)))


def check(sweep: Sweep) -> None:
    """Checks the settings that all trials share, and the names of those that are searched, before the first trial."""
    words = [word for name in sweep.config for word in ("--config", str(configs.find(name)))]
    run = checked("fit", [*words, *sweep.arguments])
    chosen = {"model": type(run.model), "data": type(run.datamodule)}
    for name in sweep.search:
        group, _, rest = name.partition(".")
        if name not in ALONE and rest.removeprefix("init_args.").partition(".")[0] not in of_group(group, chosen):
            raise UsageError(f"search: {unknown_option(name, chosen)}")


def _finished(study: Any) -> int:
    return sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))


def resume_trials(sweep: Sweep, study: Any, folder: Path, wait: bool = False) -> None:
    """Resumes the trials that no process runs any more."""
    import optuna

    for unfinished in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
        with locked(folder / f"trial_{unfinished.number:04}.lock", wait) as is_ours:
            # Another process may have finished this trial while this one ran earlier trials or waited.
            if is_ours and study.get_trials(deepcopy=False)[unfinished.number].state == unfinished.state:
                print(f"trial {unfinished.number}: resumed", flush=True)
                run_trial(sweep, study, optuna.trial.Trial(study, unfinished._trial_id), folder)


def run_trial(sweep: Sweep, study: Any, trial: Any, folder: Path) -> None:
    """Runs a trial's seeds without a result, and tells the study the mean."""
    from optuna.trial import TrialState

    failure: Exception | None = None
    chosen = {name: found.choose(trial, name) for name, found in sweep.ranges.items()}
    what = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in chosen.items())
    run_folder = folder / "runs" / f"trial_{trial.number:04}"
    value: float | None = None
    try:
        value = fmean(run_seed(sweep, trial, chosen, run_folder, index) for index in range(sweep.seeds))
        state, outcome = TrialState.COMPLETE, f"{sweep.objective} {value:.6g}"
    except Pruned as pruned:
        state, outcome = TrialState.PRUNED, f"pruned at {pruned}"
    except FAILURES as error:
        state, failure, outcome = TrialState.FAIL, error, f"failed: {error}"
    if not sweep.keep_checkpoints:
        remove_checkpoints(run_folder)
    finished = study.tell(trial, value, state=state)
    write_hparams(folder, sweep, finished, chosen)
    print(f"trial {trial.number}: {what}: {outcome}", flush=True)
    states = [one.state for one in study.get_trials(deepcopy=False)]
    if state == TrialState.FAIL and states.count(state) >= MOST_FAILURES and TrialState.COMPLETE not in states:
        raise UsageError(f"the first {states.count(state)} trials failed; the last one said: {failure}")


def run_seed(sweep: Sweep, trial: Any, chosen: dict[str, str], folder: Path, index: int) -> float:
    """Runs or resumes one seed of a trial; returns its result, which the storage keeps."""
    attributes = trial.user_attrs
    seed = sweep.first_seed + index
    if f"seed_{seed}" in attributes:
        return float(attributes[f"seed_{seed}"])
    print(f"trial {trial.number}, seed {seed} ({index + 1} of {sweep.seeds})", file=sys.stderr, flush=True)
    judge = Judge(sweep, trial, [attributes[f"curve_{sweep.first_seed + i}"] for i in range(index)])
    result = run_once(sweep, chosen, seed, folder, judge)
    trial.set_user_attr(f"curve_{seed}", judge.values)
    trial.set_user_attr(f"seed_{seed}", result)
    return result


def _report(sweep: Sweep, study: Any, folder: Path, finals: dict[int, float]) -> list[str]:
    """Returns the lines that end a sweep: the best trials, and the command that trains with the best settings."""
    where = f"HParams view: tensorboard --logdir {folder / 'hparams'}; curves: --logdir {folder / 'runs'}"
    best = best_trials(sweep, study, max(5, sweep.finalists))  # the winner may be the last of the finalists
    lines = []
    for trial in best:
        settings = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in trial.params.items())
        lines.append(f"trial {trial.number}: {sweep.objective} {trial.value:.6g}: {settings}")
    winner = best[0]
    if finals:
        seeds = f"seeds {sweep.final_seed} to {sweep.final_seed + sweep.final_seeds - 1}"
        lines += [f"trial {number}: {sweep.objective} {mean:.6g} on {seeds}" for number, mean in finals.items()]
        winner = next(trial for trial in best if trial.number == next(iter(finals)))
    words = ["rl", "fit", *(word for name in sweep.config for word in ("--config", name)), *sweep.arguments]
    return [*lines, where, shlex.join([*words, *(f"--{name}={value}" for name, value in winner.params.items())])]


def run_finals(sweep: Sweep, study: Any, folder: Path) -> dict[int, float]:
    """Runs the rest of the second round, together with other processes of the same sweep."""
    finalists = best_trials(sweep, study, sweep.finalists)
    seeds = range(sweep.final_seed, sweep.final_seed + sweep.final_seeds)
    for wait in (False, True):  # what other processes run is waited for in the end
        for seed in seeds:
            for trial in finalists:
                with locked(folder / f"final_{trial.number:04}_{seed}.lock", wait) as is_ours:
                    if is_ours and _key(trial, seed) not in study.user_attrs:
                        _run(sweep, study, trial, seed, folder)
    means = {}
    for trial in finalists:
        results = [study.user_attrs[_key(trial, seed)] for seed in seeds]
        if not any(isinstance(result, str) for result in results):
            means[trial.number] = fmean(results)
            write_hparams(folder, sweep, trial, _words(trial), means[trial.number])
    return dict(sorted(means.items(), key=lambda found: found[1], reverse=sweep.mode == "max"))


def _run(sweep: Sweep, study: Any, trial: Any, seed: int, folder: Path) -> None:
    """Runs or resumes one seed of a finalist, and stores its result: a number, or the sentence that it failed with."""
    run_folder = folder / "runs" / f"final_{trial.number:04}"
    result: float | str
    try:
        result = run_once(sweep, _words(trial), seed, run_folder)
        outcome = f"{sweep.objective} {result:.6g}"
    except FAILURES as error:
        result = str(error)
        outcome = f"failed: {error}"
    study.set_user_attr(_key(trial, seed), result)
    if not sweep.keep_checkpoints:
        remove_checkpoints(run_folder)
    print(f"finalist {trial.number}, seed {seed}: {outcome}", flush=True)


def _key(trial: Any, seed: int) -> str:
    return f"final_{trial.number}_{seed}"


def _words(trial: Any) -> dict[str, str]:
    return {name: str(value) for name, value in trial.params.items()}
