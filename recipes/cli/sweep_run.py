"""One run of a sweep. A run of a trial reports its curve while it trains, and ends if the trial is pruned."""

import gc
import math
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch

from recipes import configs
from recipes.callbacks import curves
from recipes.cli import summary
from recipes.cli.lightning_cli import RLCLI
from recipes.cli.sweep_file import Sweep
from rl_modules.common.errors import UsageError
from rl_modules.core.state import Stateful, persistent

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
    """``rl fit`` of one seed, without its printed summary."""

    def __init__(self, args: list[str], judge: Judge | None) -> None:
        self.judge = judge
        super().__init__("fit", args)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        config["enable_progress_bar"] = False
        if config["devices"] == "auto":
            config["devices"] = 1
        trainer = super()._instantiate_trainer(config, [*callbacks, *([] if self.judge is None else [self.judge])])
        if trainer.world_size > 1:  # each further process would repeat the whole sweep
            raise UsageError(f"trainer.devices={config['devices']}: a trial of a sweep trains in one process; leave it "
                             "out, and start the same sweep once per device")  # fmt: skip
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
    words += ["--trainer.logger", "lightning.pytorch.loggers.TensorBoardLogger", "--trainer.logger.save_dir",
              str(folder.parent), "--trainer.logger.name", folder.name, "--trainer.logger.version", run.name,
              "--trainer.logger.default_hp_metric", "false", "--seed_everything", str(seed)]  # fmt: skip
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
