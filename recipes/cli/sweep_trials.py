"""The trials of a sweep: their runs, their storage in Optuna's SQLite file, TensorBoard's HParams view."""

import fcntl
import gc
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from recipes import configs, summary
from recipes.callbacks import curves
from recipes.cli.lightning_cli import RLCLI
from recipes.cli.sweep_file import CHANGEABLE, Sweep
from rl_modules.common.errors import UsageError
from rl_modules.common.extras import install
from rl_modules.common.seeding import stream_seed
from rl_modules.core.state import Stateful, persistent

try:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler, TPESampler
    from optuna.trial import FrozenTrial, TrialState
except ModuleNotFoundError as missing:
    raise UsageError(f"rl sweep needs {missing.name}, which is not installed: {install('sweep')}") from missing

#: Errors that count as a failed trial: contradictory settings, diverged weights, or a batch too large for the GPU.
FAILURES = (UsageError, FloatingPointError, torch.cuda.OutOfMemoryError)


class Pruned(Exception):
    """The trial is worse than the others were at this evaluation."""


class Judge(Stateful, L.Callback):
    """Reports every new value of the monitored curve, and ends a run that is to be pruned."""

    #: Distance between the steps of two seeds, more than a run has evaluations.
    STRIDE = 100_000
    #: Values of this run's curve.
    values: list[float] = persistent([])

    def __init__(self, sweep: Sweep, trial: Any, before: list[list[float]]) -> None:
        self.sweep, self.trial, self.before = sweep, trial, before

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        if self.sweep.monitor not in metrics:
            raise UsageError(
                f"monitor={self.sweep.monitor!r} is not among what an evaluation of this run knows: "
                f"{', '.join(sorted(metrics))}"
            )
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
    """``rl fit`` of one seed, without its printed summary."""

    summarizes = False

    def __init__(self, args: list[str], judge: Judge | None) -> None:
        self.judge = judge
        super().__init__("fit", args)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        if config["devices"] == "auto":
            config["devices"] = 1
        trainer = super()._instantiate_trainer(config, [*callbacks, *([] if self.judge is None else [self.judge])])
        if trainer.world_size > 1:  # each further process would repeat the whole sweep
            raise UsageError(
                f"trainer.devices={config['devices']}: a trial of a sweep trains in one process; leave it "
                "out, and start the same sweep once per device"
            )
        return trainer

    def after_fit(self) -> None:
        """Evaluates the final policy and writes the result to the run's curves."""
        data: Any = self.datamodule
        final, interrupted = summary.evaluate(self.trainer, self.model, data, self._controls)
        if interrupted:
            raise SystemExit(130)
        step = data.num_timesteps if self._controls else self.trainer.global_step
        summary.record_final(self.trainer, self.model, data, final, step)


def run_once(sweep: Sweep, chosen: dict[str, str], seed: int, folder: Path, judge: Judge | None = None) -> float:
    """Runs or resumes one seed of some settings in ``folder/seed_<seed>``; returns the objective's last value."""
    run = folder / f"seed_{seed}"
    words = [word for name in sweep.config for word in ("--config", str(configs.find(name)))]
    words += [*sweep.arguments, *(f"--{name}={value}" for name, value in chosen.items())]
    words += [
        "--trainer.logger",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "--trainer.logger.save_dir",
        str(folder.parent),
        "--trainer.logger.name",
        folder.name,
        "--trainer.logger.version",
        run.name,
        "--trainer.logger.default_hp_metric",
        "false",
        "--seed_everything",
        str(seed),
    ]
    if (run / "checkpoints").is_dir():
        words.append("--resume")
    elif run.exists():
        shutil.rmtree(run)  # killed before its first checkpoint
    # Lightning's objects form reference cycles, so the last run's model and buffer would stay in memory during this
    # run.
    gc.collect()
    TrialRun(words, judge)
    found = curves.points(run)
    if sweep.objective not in found:
        raise UsageError(f"objective={sweep.objective!r} is no curve of the run {run}; it has {', '.join(found)}")
    result = found[sweep.objective][-1][1]
    if not math.isfinite(result):
        raise UsageError(f"{sweep.objective} of the run {run} is {result}")
    return float(result)


def remove_checkpoints(folder: Path) -> None:
    """Removes the checkpoints of all runs in ``folder``."""
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)


class SeededSampler(BaseSampler):
    """TPE whose randomness depends on the seed and the trial's number, so that a resumed sweep draws as a whole one."""

    def __init__(self, seed: int, n_startup_trials: int) -> None:
        self.seed, self.n_startup_trials = seed, n_startup_trials

    def _sampler(self, trial: FrozenTrial, purpose: str) -> TPESampler:
        seed = stream_seed(self.seed, 0, purpose, trial.number)
        return TPESampler(seed=seed, n_startup_trials=self.n_startup_trials)

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler(trial, "sweep").infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Any, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler(trial, "sweep").sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        sampler = self._sampler(trial, f"sweep {param_name}")
        return sampler.sample_independent(study, trial, param_name, param_distribution)


def open_study(sweep: Sweep, folder: Path) -> Any:
    """Opens the study of a sweep, or creates it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    pruner = optuna.pruners.MedianPruner(sweep.startup_trials, sweep.warmup_evaluations)
    storage = f"sqlite:///{folder / 'sweep.db'}"
    create = partial(
        optuna.create_study,
        storage=storage,
        sampler=SeededSampler(sweep.sampler_seed, sweep.startup_trials),
        pruner=pruner,
        study_name=sweep.name,
        direction="maximize" if sweep.mode == "max" else "minimize",
        load_if_exists=True,
    )
    study = create()
    begun = study.user_attrs.get("settings")
    states = {trial.state for trial in study.get_trials(deepcopy=False)}
    if begun not in (None, sweep.identity) and states <= {TrialState.FAIL}:
        # Without a result there is nothing that the changed settings could mislead: the sweep begins anew.
        optuna.delete_study(study_name=sweep.name, storage=storage)
        for name in ("runs", "hparams"):
            shutil.rmtree(folder / name, ignore_errors=True)
        study, begun = create(), None
    if begun not in (None, sweep.identity):
        raise UsageError(
            f"{folder} has a sweep with other settings, or its config had another text; only "
            f"{', '.join(CHANGEABLE)} may change once a trial has a result: give this one another name, or remove the "
            "folder"
        )
    if begun is None:
        study.set_user_attr("settings", sweep.identity)
    return study


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


def best_trials(sweep: Sweep, study: Any, most: int) -> list[FrozenTrial]:
    """Returns the complete trials with the best results, the best first, ``most`` at most, all with other settings."""
    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    best: list[FrozenTrial] = []
    for trial in sorted(done, key=lambda trial: trial.value, reverse=sweep.mode == "max"):
        if all(trial.params != better.params for better in best):
            best.append(trial)
    return best[:most]


def write_hparams(
    folder: Path, sweep: Sweep, trial: FrozenTrial, chosen: dict[str, str], final: float | None = None
) -> None:
    """Writes a finished trial as one row of the HParams view: its settings, result and curve."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    place = folder / "hparams" / f"trial_{trial.number:04}"
    if place.exists():
        shutil.rmtree(place)
    settings = {**{name: _number(value) for name, value in chosen.items()}, "state": trial.state.name.lower()}
    results = {} if trial.value is None else {sweep.objective: float(trial.value)}
    if final is not None:
        results[f"final/{sweep.objective}"] = final
    with SummaryWriter(str(place)) as writer:
        for summary in hparams(settings, results):
            writer.file_writer.add_summary(summary)
        for name, value in results.items():
            writer.add_scalar(name, value)
        for step, value in sorted(trial.intermediate_values.items()):
            writer.add_scalar(f"evaluations/{sweep.monitor}", value, step)


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
