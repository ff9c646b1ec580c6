"""Language metrics carry the names that TensorBoard shows for TRL, in every logger and for callbacks."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers.integrations.integration_utils import rewrite_logs

from datamodules import PromptDataModule
from rl_modules import GRPO
from rl_modules.language.metrics import displayed_name
from tests.rl_modules.language.test_run_state import Curves, addition, fit, grpo


def test_training_metrics_are_named_as_transformers_shows_them() -> None:
    names = ["reward", "reward_std", "kl", "clip_ratio/low_mean", "completions/mean_length", "rewards/f/mean",
             "sampling/importance_ratio/mean", "num_tokens", "learning_rate"]  # fmt: skip
    assert [displayed_name(name) for name in names] == list(rewrite_logs(dict.fromkeys(names, 0.0)))
    assert [displayed_name(f"eval/{name}") for name in names] == list(
        rewrite_logs(dict.fromkeys([f"eval_{name}" for name in names], 0.0))
    )
    assert displayed_name("train/reward") == "train/reward"


class Noting(GRPO):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.record(mine=2.0, **{"train/named": 3.0})
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_every_logged_name_has_a_group_and_a_subclass_gets_the_prefix() -> None:
    curves = Curves()
    module = Noting(**{k: v for k, v in grpo().hparams.items() if k != "description"})
    fit(module, addition(eval_steps=2, n_eval=4), max_steps=2, logger=curves)
    names = {name for _, point in curves.points for name in point} - {"epoch"}
    assert names and all(name.startswith(("train/", "eval/", "time/")) for name in names)
    assert {"train/mine", "train/named", "train/reward", "train/rewards/reward/mean", "train/num_tokens",
            "train/learning_rate", "train/grad_norm", "train/loss", "train/clip_ratio/low_mean"} <= names  # fmt: skip
    assert module.latest_metrics["train/mine"] == 2.0


def rising(prompts: Any, completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
    """A reward that depends on the step alone; reads TRL's log, which has TRL's own names."""
    if trainer_state.log_history:
        assert "reward" in trainer_state.log_history[-1]
    return [float(trainer_state.global_step + i % 2) for i in range(len(completions))]


@pytest.mark.long
@pytest.mark.parametrize("logging_steps", [1, 50])
def test_early_stopping_monitors_a_training_metric(logging_steps: int, tmp_path: Path) -> None:
    stop = EarlyStopping("train/reward", mode="max", stopping_threshold=2.4, check_on_train_epoch_end=True)
    save = ModelCheckpoint(tmp_path, monitor="train/reward", mode="max", save_on_train_epoch_end=True)
    data = addition(reward_funcs=[rising], num_generations=4)
    curves = Curves()
    trainer = fit(grpo(logging_steps=logging_steps), data, max_steps=12, logger=curves, callbacks=[stop, save],
                  enable_checkpointing=True)  # fmt: skip
    # Half of the completions of step t earn t + 1, the others t.
    logged = {step: point["train/reward"] for step, point in curves.points}
    if logging_steps == 1:
        assert logged == {step: pytest.approx(step - 0.5) for step in logged}
        assert trainer.global_step == 3
        assert save.best_model_score == pytest.approx(2.5)
    else:  # no point of the curves yet: the mean of what was recorded so far
        assert save.best_model_score == pytest.approx(logged[trainer.global_step])


@pytest.mark.long
def test_a_resumed_run_knows_the_last_point_of_what_is_monitored(tmp_path: Path) -> None:
    def run(steps: int, **more: Any) -> Any:
        callbacks = [EarlyStopping("train/loss", check_on_train_epoch_end=True), *more.pop("callbacks", [])]
        return fit(grpo(), addition(), max_steps=steps, callbacks=callbacks, **more)

    run(3).save_checkpoint(tmp_path / "three.ckpt")
    saved = torch.load(tmp_path / "three.ckpt", weights_only=True)["monitored"]
    assert list(saved) == ["train/loss"]

    class Look(L.Callback):
        seen: float | None = None

        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            self.seen = self.seen or float(trainer.callback_metrics["train/loss"])

    look = Look()
    run(4, callbacks=[look], ckpt_path=tmp_path / "three.ckpt")
    assert look.seen == pytest.approx(saved["train/loss"])


@pytest.mark.long
def test_csv_and_learning_rate_monitor_share_the_axis_of_optimizer_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="")
    data = PromptDataModule("addition", batch_size=8, num_generations=4, n_train=8, n_eval=4, eval_steps=2)
    module = grpo(lr_scheduler_type="linear", logging_steps=2)
    fit(module, data, max_steps=6, logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1,
        accumulate_grad_batches=2)  # fmt: skip
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {name: {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in rows[0]}
    assert list(curves["train/reward"]) == [2, 4, 6] and list(curves["eval/pass@1"]) == [0, 2, 4, 6]
    monitored = curves["lr-AdamW/pg1"]
    assert list(monitored) == [0, 1, 2, 3, 4, 5]
    assert [curves["train/learning_rate"][step] for step in (2, 4)] == [monitored[step] for step in (2, 4)]
    assert len(set(monitored.values())) == 6


@pytest.mark.long
def test_tensorboard_shows_the_learning_curve_in_the_first_group(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="")
    data = addition(eval_steps=2, n_eval=4)
    fit(grpo(logging_steps=1, completions_steps=1), data, max_steps=2, logger=logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload()
    curve, reward = ([(e.step, e.value) for e in events.Scalars(tag)] for tag in ("curve/reward", "train/reward"))
    assert curve == reward and len(curve) == 2
    # The time series page has scalars, histograms and images, in groups sorted by name, the first two of them open.
    cards = [*events.Tags()["scalars"], *events.Tags()["histograms"], *events.Tags()["images"]]
    assert sorted({tag.partition("/")[0] for tag in cards} - {"epoch"}) == ["curve", "eval", "time", "train"]
