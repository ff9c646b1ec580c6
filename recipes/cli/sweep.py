"""``rl sweep``: searches settings with Optuna. Every trial is one or several runs of ``rl fit``."""

import fcntl
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from recipes import configs
from recipes.cli.options import ALONE, of_group, unknown_option
from recipes.cli.sweep_file import CHANGEABLE, Sweep, read
from recipes.cli.sweep_trials import Judge, remove_checkpoints, run_once
from recipes.pipeline import checked
from recipes.run import LOGS
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed

# `read` says what to install where Optuna is missing.
import optuna  # isort: skip
from optuna.trial import FrozenTrial, Trial, TrialState  # isort: skip

#: Errors that count as a failed trial: contradictory settings, diverged weights, or a batch too large for the GPU.
FAILURES = (UsageError, FloatingPointError, torch.cuda.OutOfMemoryError)
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
    done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    print(f"sweep of {', '.join(sweep.search)} in {folder}: {done} of {sweep.n_trials} trials done", flush=True)
    resume_trials(sweep, study, folder)
    while begun := begin_trial(sweep, study, folder):
        trial, lock = begun
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


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Holds a file's lock, which ends with the process; yields whether it is held."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def open_study(sweep: Sweep, folder: Path) -> optuna.Study:
    """Opens the study of a sweep in Optuna's SQLite storage, or creates it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", "The reported value is ignored")
    storage = f"sqlite:///{folder / 'sweep.db'}"
    create = partial(
        optuna.create_study,
        study_name=sweep.name,
        storage=storage,
        direction="maximize" if sweep.mode == "max" else "minimize",
        pruner=optuna.pruners.MedianPruner(sweep.startup_trials, sweep.warmup_evaluations),
        load_if_exists=True,
    )
    study = create()
    begun = study.user_attrs.get("settings")
    if begun not in (None, sweep.identity):
        if any(trial.state != TrialState.FAIL for trial in study.get_trials(deepcopy=False)):
            raise UsageError(
                f"{folder} has a sweep with other settings, or its config had another text; only "
                f"{', '.join(CHANGEABLE)} may change once a trial has a result: give this one another name, or remove "
                "the folder"
            )
        # Without a result there is nothing that the changed settings could mislead: the sweep begins anew.
        optuna.delete_study(study_name=sweep.name, storage=storage)
        for name in ("runs", "hparams"):
            shutil.rmtree(folder / name, ignore_errors=True)
        study = create()
    study.set_user_attr("settings", sweep.identity)
    return study


def begin_trial(sweep: Sweep, study: optuna.Study, folder: Path) -> tuple[Trial, Any] | None:
    """Draws the settings of a new trial; returns it with its lock, which ends with the process; None: all have begun.

    The draw depends on the seed, the trial's number and the results so far, so that a resumed sweep draws as a whole
    one.
    """
    # No other process begins a trial between the count and `ask`, nor takes this one before it is locked.
    with locked(folder / "begin.lock", wait=True):
        if (number := len(study.get_trials(deepcopy=False))) >= sweep.n_trials:
            return None
        seed = stream_seed(sweep.sampler_seed, 0, "sweep", number)
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=sweep.startup_trials)
        lock = _lock_of(folder, number).open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return study.ask(sweep.ranges), lock


def _lock_of(folder: Path, number: int) -> Path:
    return folder / f"trial_{number:04}.lock"


def resume_trials(sweep: Sweep, study: optuna.Study, folder: Path, wait: bool = False) -> None:
    """Resumes the trials that no process runs any more."""
    for unfinished in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        with locked(_lock_of(folder, unfinished.number), wait) as is_ours:
            # Another process may have finished this trial while this one ran earlier trials or waited.
            if is_ours and study.get_trials(deepcopy=False)[unfinished.number].state == unfinished.state:
                print(f"trial {unfinished.number}: resumed", flush=True)
                run_trial(sweep, study, Trial(study, unfinished._trial_id), folder)


def run_trial(sweep: Sweep, study: optuna.Study, trial: Trial, folder: Path) -> None:
    """Runs a trial's seeds without a result, and tells the study the mean."""
    run_folder = folder / "runs" / f"trial_{trial.number:04}"
    value: float | None = None
    try:
        if missing := sweep.ranges.keys() - trial.params.keys():
            raise UsageError(f"killed before it had drawn {', '.join(missing)}")
        done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if (earlier := next((one for one in done if one.params == trial.params), None)) is not None:
            value = earlier.value
            for step, reported in earlier.intermediate_values.items():
                trial.report(reported, step)
        else:
            value = fmean(run_seed(sweep, trial, run_folder, index) for index in range(sweep.seeds))
        state, outcome = TrialState.COMPLETE, f"{sweep.objective} {value:.6g}"
    except optuna.TrialPruned as pruned:
        state, outcome = TrialState.PRUNED, f"pruned at {pruned}"
    except FAILURES as error:
        state, outcome = TrialState.FAIL, f"failed: {error}"
    if not sweep.keep_checkpoints:
        remove_checkpoints(run_folder)
    write_hparams(folder, sweep, study.tell(trial, value, state=state))
    print(f"trial {trial.number}: {_settings(trial.params)}: {outcome}", flush=True)
    states = [one.state for one in study.get_trials(deepcopy=False)]
    if state == TrialState.FAIL and states.count(state) >= MOST_FAILURES and TrialState.COMPLETE not in states:
        raise UsageError(f"the first {states.count(state)} trials failed; the last one {outcome}")


def run_seed(sweep: Sweep, trial: Trial, folder: Path, index: int) -> float:
    """Runs or resumes one seed of a trial; returns its result, which the storage keeps."""
    kept, seed = trial.user_attrs, sweep.first_seed + index
    if f"seed_{seed}" in kept:
        return float(kept[f"seed_{seed}"])
    print(f"trial {trial.number}, seed {seed} ({index + 1} of {sweep.seeds})", file=sys.stderr, flush=True)
    judge = Judge(sweep, trial, [kept[f"curve_{sweep.first_seed + i}"] for i in range(index)])
    result = run_once(sweep, trial.params, seed, folder, judge)
    trial.set_user_attr(f"curve_{seed}", judge.values)
    trial.set_user_attr(f"seed_{seed}", result)
    return result


def best_trials(sweep: Sweep, study: optuna.Study, most: int) -> list[FrozenTrial]:
    """Returns the complete trials with the best results, the best first, ``most`` at most, all with other settings."""
    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    best: list[FrozenTrial] = []
    for trial in sorted(done, key=lambda trial: trial.values, reverse=sweep.mode == "max"):
        if all(trial.params != better.params for better in best):
            best.append(trial)
    return best[:most]


def run_finals(sweep: Sweep, study: optuna.Study, folder: Path) -> dict[int, float]:
    """Runs the rest of the second round, together with other processes of the same sweep; returns means by trial.

    A run's result is a number, or the sentence that it failed with.
    """
    finalists = best_trials(sweep, study, sweep.finalists)
    seeds = range(sweep.final_seed, sweep.final_seed + sweep.final_seeds)
    for wait in (False, True):  # what other processes run is waited for in the end
        for seed, trial in ((seed, trial) for seed in seeds for trial in finalists):
            key = f"final_{trial.number}_{seed}"
            with locked(folder / f"final_{trial.number:04}_{seed}.lock", wait) as is_ours:
                if not is_ours or key in study.user_attrs:
                    continue
                run_folder = folder / "runs" / f"final_{trial.number:04}"
                result: float | str
                try:
                    result = run_once(sweep, trial.params, seed, run_folder)
                except FAILURES as error:
                    result = f"{error}"
                study.set_user_attr(key, result)
                if not sweep.keep_checkpoints:
                    remove_checkpoints(run_folder)
                outcome = f"failed: {result}" if isinstance(result, str) else f"{sweep.objective} {result:.6g}"
                print(f"finalist {trial.number}, seed {seed}: {outcome}", flush=True)
    means = {}
    for trial in finalists:
        results = [study.user_attrs[f"final_{trial.number}_{seed}"] for seed in seeds]
        if not any(isinstance(result, str) for result in results):
            means[trial.number] = fmean(results)
            write_hparams(folder, sweep, trial, {f"final/{sweep.objective}": means[trial.number]})
    return dict(sorted(means.items(), key=lambda found: found[1], reverse=sweep.mode == "max"))


def write_hparams(folder: Path, sweep: Sweep, trial: FrozenTrial, final: dict[str, float] | None = None) -> None:
    """Writes a finished trial as one row of TensorBoard's HParams view: its settings and results."""
    from torch.utils.tensorboard import SummaryWriter

    name = f"trial_{trial.number:04}"
    shutil.rmtree(folder / "hparams" / name, ignore_errors=True)
    results = {} if trial.value is None else {sweep.objective: trial.value, **(final or {})}
    with SummaryWriter(str(folder / "hparams" / name)) as writer:
        writer.add_hparams({**trial.params, "state": trial.state.name.lower()}, results, run_name=".")


def _settings(params: dict[str, Any]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in params.items())


def _report(sweep: Sweep, study: optuna.Study, folder: Path, finals: dict[int, float]) -> list[str]:
    """Returns the lines that end a sweep: the best trials, and the command that trains with the best settings."""
    best = best_trials(sweep, study, max(5, sweep.finalists))  # the winner may be the last of the finalists
    lines = [f"trial {trial.number}: {sweep.objective} {trial.value:.6g}: {_settings(trial.params)}" for trial in best]
    winner = best[0]
    if finals:
        seeds = f"seeds {sweep.final_seed} to {sweep.final_seed + sweep.final_seeds - 1}"
        lines += [f"trial {number}: {sweep.objective} {mean:.6g} on {seeds}" for number, mean in finals.items()]
        winner = next(trial for trial in best if trial.number == next(iter(finals)))
    where = f"HParams view: tensorboard --logdir {folder / 'hparams'}; curves: --logdir {folder / 'runs'}"
    words = ["rl", "fit", *(word for name in sweep.config for word in ("--config", name)), *sweep.arguments]
    return [*lines, where, shlex.join([*words, *(f"--{name}={value}" for name, value in winner.params.items())])]
