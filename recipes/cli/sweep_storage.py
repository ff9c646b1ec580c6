"""Storage of a sweep's trials: Optuna's SQLite file, and TensorBoard's HParams view."""

import fcntl
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.cli.sweep_file import CHANGEABLE, Sweep
from rl_modules.common.errors import UsageError
from rl_modules.common.extras import install
from rl_modules.common.seeding import stream_seed

try:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler, TPESampler
    from optuna.trial import FrozenTrial, TrialState
except ModuleNotFoundError as missing:
    raise UsageError(f"rl sweep needs {missing.name}, which is not installed: {install('sweep')}") from missing


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
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'sweep.db'}",
        sampler=SeededSampler(sweep.sampler_seed, sweep.startup_trials),
        pruner=pruner,
        study_name=sweep.name,
        direction="maximize" if sweep.mode == "max" else "minimize",
        load_if_exists=True,
    )
    begun = study.user_attrs.get("settings")
    if begun not in (None, sweep.identity):
        raise UsageError(f"{folder} has a sweep with other settings, or its config had another text; only "
                         f"{', '.join(CHANGEABLE)} may change: give this one another name, or remove the "
                         "folder")  # fmt: skip
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


def same_settings(study: Any, trial: Any) -> FrozenTrial | None:
    """Returns the complete trial that drew ``trial``'s settings first, whose runs would only be repeated; else None."""
    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return next((one for one in done if one.params == trial.params), None)


def copy_evaluations(study: Any, source: FrozenTrial, trial: Any) -> None:
    """Reports the evaluations of ``source`` as those of ``trial``, so that later trials are pruned as if it had run."""
    known = study.get_trials(deepcopy=False)[trial.number].intermediate_values
    for step, value in sorted(source.intermediate_values.items()):
        if step not in known:  # a resumed trial has reported some
            trial.report(value, step)


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
