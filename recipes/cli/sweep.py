"""``rl sweep``: searches settings with Optuna. Every trial is one or several runs of ``rl fit``."""

import fcntl
import gc
import math
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipes import configs
from recipes.callbacks import curves
from recipes.cli import runs
from recipes.cli.sweep_file import Sweep, read
from recipes.cli.sweep_run import Judge, Pruned, TrialRun
from recipes.cli.sweep_storage import open_study, write_hparams
from rl_modules.common.errors import UsageError

#: Failed trials after which a sweep without a single result stops.
FAILURES = 3


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds a file's lock, which ends with the process; yields whether another process has it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def sweep_command(words: list[str]) -> None:
    """Runs or resumes the sweep that ``words`` name: its file, and arguments for all runs.

    Raises:
        UsageError: no file, a wrong key, or trials that all fail.
    """
    if not words or words[0].startswith("-"):
        raise UsageError("sweep takes a file, as in `rl sweep sweeps/trpo/lunarlander.yaml --n_trials 50`; got "
                         f"{' '.join(words) or 'none'}")  # fmt: skip
    sweep = read(words[0], words[1:])
    folder = Path(runs.LOGS) / f"sweep-{sweep.name}"
    folder.mkdir(parents=True, exist_ok=True)
    study = open_study(sweep, folder)
    print(f"sweep of {', '.join(sweep.search)} in {folder}: {_finished(study)} of {sweep.n_trials} trials done",
          flush=True)  # fmt: skip
    import optuna

    for unfinished in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
        with locked(folder / f"trial_{unfinished.number:04}.lock") as is_free:
            # While this process ran the trials before, another may have finished this one.
            if is_free and study.get_trials(deepcopy=False)[unfinished.number].state == unfinished.state:
                print(f"trial {unfinished.number}: resumed", flush=True)
                run_trial(sweep, study, optuna.trial.Trial(study, unfinished._trial_id), folder)
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
    print("\n".join(_report(sweep, study, folder)))


def _finished(study: Any) -> int:
    return sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))


def run_trial(sweep: Sweep, study: Any, trial: Any, folder: Path) -> None:
    """Runs the seeds of a trial that have no result yet, and tells the study the mean.

    Raises:
        UsageError: several trials failed and none has a result.
    """
    from optuna.trial import TrialState

    failure: Exception | None = None
    chosen = {name: found.choose(trial, name) for name, found in sweep.search.items()}
    what = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in chosen.items())
    run_folder = folder / "runs" / f"trial_{trial.number:04}"
    value: float | None = None
    try:
        results = [run_seed(sweep, trial, chosen, run_folder, index) for index in range(sweep.seeds)]
        value = sum(results) / len(results)
        state, outcome = TrialState.COMPLETE, f"{sweep.objective} {value:.6g}"
    except Pruned as pruned:
        state, outcome = TrialState.PRUNED, f"pruned at {pruned}"
    # A language model's logits are NaN, or a batch is too large for the GPU.
    except (UsageError, FloatingPointError, torch.cuda.OutOfMemoryError) as error:
        state, failure, outcome = TrialState.FAIL, error, f"failed: {error}"
    if not sweep.keep_checkpoints:
        for checkpoints in run_folder.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)
    finished = study.tell(trial, value, state=state)
    write_hparams(folder, sweep, finished, chosen)
    print(f"trial {trial.number}: {what}: {outcome}", flush=True)
    states = [one.state for one in study.get_trials(deepcopy=False)]
    if state == TrialState.FAIL and states.count(state) >= FAILURES and TrialState.COMPLETE not in states:
        raise UsageError(f"the first {states.count(state)} trials failed; the last one said: {failure}")


def run_seed(sweep: Sweep, trial: Any, chosen: dict[str, str], folder: Path, index: int) -> float:
    """Runs or resumes one seed of a trial; returns its result, which the storage keeps.

    Raises:
        Pruned: the trial is not worth its other seeds.
        UsageError: the run fails, or has no such curve.
    """
    attributes = trial.user_attrs
    seed = sweep.first_seed + index
    if f"seed_{seed}" in attributes:
        return float(attributes[f"seed_{seed}"])
    judge = Judge(sweep, trial, [attributes[f"curve_{sweep.first_seed + i}"] for i in range(index)])
    run = folder / f"seed_{seed}"
    words = [word for name in sweep.config for word in ("--config", str(configs.find(name)))]
    words += [*sweep.arguments, *(f"--{name}={value}" for name, value in chosen.items())]
    words += ["--trainer.logger", "lightning.pytorch.loggers.TensorBoardLogger", "--trainer.logger.save_dir",
              str(folder.parent), "--trainer.logger.name", folder.name, "--trainer.logger.version", run.name,
              "--trainer.logger.default_hp_metric", "false", "--seed_everything", str(seed)]  # fmt: skip
    if (run / "checkpoints").is_dir():
        words.append("--resume")
    elif run.exists():
        shutil.rmtree(run)  # killed before its first checkpoint
    # Lightning's objects refer to one another: the last run's model and buffer would stay in memory beside this one's.
    gc.collect()
    TrialRun(words, judge)
    found = curves.points(run)
    if sweep.objective not in found:
        raise UsageError(f"objective={sweep.objective!r} is no curve of the run {run}; it has {', '.join(found)}")
    result = found[sweep.objective][-1][1]
    if not math.isfinite(result):
        raise UsageError(f"{sweep.objective} of the run {run} is {result}")
    trial.set_user_attr(f"curve_{seed}", judge.values)
    trial.set_user_attr(f"seed_{seed}", result)
    return result


def _report(sweep: Sweep, study: Any, folder: Path) -> list[str]:
    """The lines that end a sweep: the best trials, and the command that trains with the best settings."""
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    lines = [f"HParams view: tensorboard --logdir {folder / 'hparams'}; curves: --logdir {folder / 'runs'}"]
    if not done:
        return ["no trial has a result", *lines]
    best = sorted(done, key=lambda trial: trial.value, reverse=sweep.mode == "max")[:5]
    for trial in best:
        settings = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in trial.params.items())
        lines.insert(-1, f"trial {trial.number}: {sweep.objective} {trial.value:.6g}: {settings}")
    words = ["rl", "fit", *(word for name in sweep.config for word in ("--config", name)), *sweep.arguments]
    return [*lines, shlex.join([*words, *(f"--{name}={value}" for name, value in best[0].params.items())])]
