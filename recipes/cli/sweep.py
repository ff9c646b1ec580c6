"""``rl sweep``: searches settings with Optuna. Every trial is one or several runs of ``rl fit``."""

import fcntl
import math
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L

from recipes import configs
from recipes.callbacks import curves
from recipes.cli import runs, summary
from recipes.cli.lightning_cli import RLCLI
from recipes.cli.sweep_file import Sweep, read
from recipes.cli.sweep_storage import open_study, write_hparams
from rl_modules.common.errors import UsageError

#: Failed trials after which a sweep without a single result stops.
FAILURES = 3


class Pruned(Exception):
    """The trial is worse than the others were at this evaluation."""


class Judge(L.Callback):
    """Reports every new value of the monitored curve, and ends a run that is to be pruned.

    Args:
        sweep: the settings.
        trial: ``optuna.trial.Trial``.
        before: the curves of the seeds that the trial has finished.
    """

    #: Distance between the steps of two seeds, more than a run has evaluations.
    STRIDE = 100_000

    def __init__(self, sweep: Sweep, trial: Any, before: list[list[float]]) -> None:
        self.sweep, self.trial, self.before = sweep, trial, before
        #: Values of this run's curve; a checkpoint stores them.
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = list(state_dict["values"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        if self.sweep.monitor not in metrics:
            raise UsageError(f"monitor={self.sweep.monitor!r} is not among what an evaluation of this run knows: "
                             f"{', '.join(sorted(metrics))}")  # fmt: skip
        self.values.append(float(metrics[self.sweep.monitor]))
        k = len(self.values) - 1
        others = [curve[min(k, len(curve) - 1)] for curve in self.before if curve]
        step = len(self.before) * self.STRIDE + k
        known = self.trial.study.get_trials(deepcopy=False)[self.trial.number].intermediate_values
        if step not in known:  # a resumed run repeats what it did after its checkpoint
            self.trial.report(sum([*others, self.values[-1]]) / (len(others) + 1), step)
        if self.sweep.prune and self.trial.should_prune():
            raise Pruned(f"evaluation {k + 1} of seed {self.sweep.first_seed + len(self.before)}")


class TrialRun(RLCLI):
    """``rl fit`` of one seed of a trial, without its printed summary.

    Args:
        args: the words after ``fit``.
        judge: the callback of the trial.
    """

    def __init__(self, args: list[str], judge: Judge) -> None:
        self.judge = judge
        super().__init__("fit", args)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        config["enable_progress_bar"] = False
        return super()._instantiate_trainer(config, [*callbacks, self.judge])

    def after_fit(self) -> None:
        """Evaluates the final policy and writes the result to the run's curves."""
        data: Any = self.datamodule
        final, interrupted = summary.evaluate(self.trainer, self.model, data, self._controls)
        if interrupted:
            raise SystemExit(130)
        step = data.num_timesteps if self._controls else self.trainer.global_step
        summary.record_final(self.trainer, self.model, data, final, step)


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
            if is_free:
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

    failure = None
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
    except UsageError as error:
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
