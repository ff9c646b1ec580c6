"""The runs of a sweep: ``rl fit`` with a seed and drawn settings, which Optuna may prune."""

import gc
import json
import math
import shutil
from pathlib import Path
from typing import Any

import lightning as L
from optuna import Trial, TrialPruned

from recipes import configs, summary
from recipes.callbacks import curves
from recipes.cli.lightning_cli import RLCLI
from recipes.cli.sweep_file import Sweep
from rl_modules.common.errors import UsageError
from rl_modules.core.state import Stateful, persistent


class Judge(Stateful, L.Callback):
    """Reports every new value of the monitored curve, and ends a run that is to be pruned."""

    #: Distance between the steps of two seeds, more than a run has evaluations.
    STRIDE = 100_000
    #: Values of this run's curve.
    values: list[float] = persistent([])

    def __init__(self, sweep: Sweep, trial: Trial, before: list[list[float]]) -> None:
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
        # Optuna keeps the first value of a step: a resumed run repeats what it did after its checkpoint.
        self.trial.report(sum([*others, self.values[-1]]) / (len(others) + 1), len(self.before) * self.STRIDE + k)
        if self.sweep.prune and self.trial.should_prune():
            raise TrialPruned(f"evaluation {k + 1} of seed {self.sweep.first_seed + len(self.before)}")


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


def run_once(sweep: Sweep, chosen: dict[str, Any], seed: int, folder: Path, judge: Judge | None = None) -> float:
    """Runs or resumes one seed of some settings in ``folder/seed_<seed>``; returns the objective's last value."""
    run = folder / f"seed_{seed}"
    place = {"save_dir": str(folder.parent), "name": folder.name, "version": run.name, "default_hp_metric": False}
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": place}
    words = [word for name in sweep.config for word in ("--config", str(configs.find(name)))]
    words += [*sweep.arguments, *(f"--{name}={value}" for name, value in chosen.items())]
    words += [f"--trainer.logger={json.dumps(logger)}", f"--seed_everything={seed}"]
    if (run / "checkpoints").is_dir():
        words.append("--resume")
    elif run.exists():
        shutil.rmtree(run)  # killed before its first checkpoint
    # Lightning's objects form reference cycles: the last run's model and buffer would stay in memory during this run.
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
