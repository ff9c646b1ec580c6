"""Checkpoints of Lightning's own callback in the last batch of an epoch, before the epoch's end, and at it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelPruning
from lightning.pytorch.cli import ReduceLROnPlateau as PlateauOfLightning

from datamodules import InstructionDataModule, PromptDataModule, ReplayDataModule, RolloutDataModule
from rl_modules import DQN, GRPO, PPO, SAC, SFT, TRPO, QLearning
from rl_modules.common.errors import UsageError
from tests.datamodules.test_first_evaluation import Curves
from tests.training import assert_equal_checkpoints, fit, rollouts

halves = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
ON_POLICY = {"n_envs": 2, "n_steps": 16, "total_timesteps": 256, "eval_freq": 0, "rollouts_per_epoch": 2}
REPLAY = {"learning_starts": 16, "train_freq": 4, "batch_size": 8, "total_timesteps": 80, "eval_freq": 0,
          "rollouts_per_epoch": 4}  # fmt: skip
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "ppo": (
        lambda: PPO(net_arch=[8], lr_scheduler=halves),
        lambda: RolloutDataModule("CartPole-v1", **ON_POLICY, batch_size=16, n_epochs=1), 4,
    ),
    "ppo, every second point": (
        lambda: PPO(net_arch=[8], log_every=2),
        lambda: RolloutDataModule("CartPole-v1", **ON_POLICY, batch_size=16, n_epochs=1), 4,
    ),
    "trpo": (
        lambda: TRPO(net_arch=[8], lr_scheduler=halves, n_critic_updates=5),
        lambda: RolloutDataModule("CartPole-v1", **ON_POLICY), 10,
    ),
    "sac": (lambda: SAC(net_arch=[8], lr_scheduler=halves), lambda: ReplayDataModule("Pendulum-v1", **REPLAY), 4),
    "dqn": (lambda: DQN(net_arch=[8], lr_scheduler=halves), lambda: ReplayDataModule("CartPole-v1", **REPLAY), 4),
    "table": (QLearning, lambda: RolloutDataModule("FrozenLake-v1", **{**ON_POLICY, "n_steps": 1}), 2),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_run_resumed_from_the_last_batch_ends_the_epoch_once(case: str, epoch: int, tmp_path: Path) -> None:
    make_model, make_data, batches = CASES[case]
    whole, rest = Curves(), Curves()
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=batches, save_top_k=-1)
    run = partial(fit, enable_checkpointing=True)
    run(make_model(), make_data(), logger=whole, callbacks=[saves], max_epochs=4).save_checkpoint(tmp_path / "whole")
    stopped = tmp_path / f"step={epoch * batches}.ckpt"
    saves = ModelCheckpoint(tmp_path / "rest", filename="{step}", every_n_train_steps=batches, save_top_k=-1)
    resumed = run(make_model(), make_data(), logger=rest, callbacks=[saves], max_epochs=4, ckpt_path=stopped)
    resumed.save_checkpoint(tmp_path / "resumed")
    assert_equal_checkpoints(tmp_path / "whole", tmp_path / "resumed")
    first = sorted({step for _, step, _ in whole.points})[(epoch - 1) // (2 if "second" in case else 1)]
    assert points(rest) == {point for point in points(whole) if point[1] >= first}
    assert len({step for _, step, _ in points(rest)}) >= 2


class Stop(L.Callback):
    """Stops in the middle of the second epoch, as ``max_time`` does."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.batches += 1
        trainer.should_stop = self.batches >= int(1.5 * trainer.num_training_batches)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_stopped_within_an_epoch_resumes_there(case: str, tmp_path: Path) -> None:
    make_model, make_data, _ = CASES[case]
    whole, first, rest = Curves(), Curves(), Curves()
    fit(make_model(), make_data(), logger=whole, max_epochs=4).save_checkpoint(tmp_path / "whole")
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    stopped = fit(make_model(), make_data(), logger=first, callbacks=[Stop(), saves], max_epochs=4,
                  enable_checkpointing=True)  # fmt: skip
    stopped.save_checkpoint(tmp_path / "stopped")
    for checkpoint in ("stopped", "epoch=1.ckpt"):
        rest = Curves()
        resumed = fit(make_model(), make_data(), logger=rest, ckpt_path=tmp_path / checkpoint, max_epochs=4)
        resumed.save_checkpoint(tmp_path / "resumed")
        assert_equal_checkpoints(tmp_path / "whole", tmp_path / "resumed")
        assert resumed.current_epoch == 4
        assert points(first) | points(rest) == points(whole) and not points(first) & points(rest)


def test_a_callback_has_something_to_monitor_in_a_run_that_is_stopped_within_its_first_epoch() -> None:
    make_model, make_data, _ = CASES["ppo"]
    stopped = fit(make_model(), make_data(), callbacks=[EarlyStopping("train/loss", strict=True)], max_steps=2)
    assert stopped.global_step == 2 and stopped.callback_metrics["train/loss"].isfinite()


@pytest.mark.parametrize("case", ["ppo", "dqn"])
def test_the_curves_of_a_complete_run_end_with_its_last_transition(case: str, tmp_path: Path) -> None:
    """``total_timesteps`` are reached within an epoch, which no run resumes."""
    make_model, make_data, _ = CASES[case]
    data, curves = make_data(), Curves()
    data.total_timesteps = 56 if case == "dqn" else 96
    trainer = fit(make_model(), data, logger=curves)
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed < trainer.num_training_batches
    assert max(step for name, step, _ in points(curves) if name == "train/loss") == data.total_timesteps
    assert not data.learner._means


def points(curves: Curves) -> set[tuple[str, int, float]]:
    assert len(set(curves.points)) == len(curves.points), "no point comes twice"
    return {point for point in curves.points if not point[0].startswith("time/")}


@pytest.mark.long
def test_a_checkpoint_from_within_an_epoch_ends_nothing(tmp_path: Path) -> None:
    ended = []

    class Counts(SAC):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            ended.append(self.source.num_timesteps)

    def data() -> ReplayDataModule:
        return ReplayDataModule("Pendulum-v1", **REPLAY)

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Counts(net_arch=[8]), data(), callbacks=[saves], enable_checkpointing=True, max_epochs=3)
    whole = ended[:]
    assert len(whole) == 3
    for step in range(1, 12):
        ended.clear()
        fit(Counts(net_arch=[8]), data(), ckpt_path=tmp_path / f"step={step}.ckpt", max_epochs=3)
        assert ended == whole[(step - 1) // 4:]  # fmt: skip


@pytest.mark.parametrize("kind", ["rollouts", "replay"])
def test_every_epoch_has_as_many_batches_as_the_trainer_limits_it_to(kind: str) -> None:
    """Of 8; the third epoch had the 2 that were left, and then neither an evaluation nor its scheduler's step."""
    environment: dict[str, Any] = {"n_envs": 2, "total_timesteps": 10**6, "eval_freq": 1, "n_eval_episodes": 1}
    model: Any
    if kind == "rollouts":
        data: Any = RolloutDataModule(
            "CartPole-v1", n_steps=16, batch_size=8, n_epochs=1, rollouts_per_epoch=2, **environment
        )
        model = PPO(net_arch=[8])
    else:
        data = ReplayDataModule("CartPole-v1", learning_starts=8, train_freq=1, rollouts_per_epoch=8, **environment)
        model = DQN(net_arch=[8])
    steps: list[int] = []

    class Evaluations(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if not trainer.sanity_checking:
                steps.append(trainer.global_step)

    fit(model, data, callbacks=[Evaluations()], limit_train_batches=3, max_epochs=5)
    assert steps == [3, 6, 9, 12, 15]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_of_max_steps_resumes_exactly_where_no_evaluation_is_due(accumulate: int, tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None, callbacks: tuple = ()) -> L.Trainer:
        data = rollouts("CartPole-v1", n_envs=2, n_steps=8, batch_size=8)
        return fit(PPO(net_arch=[4]), data, ckpt_path=ckpt_path, max_steps=7, callbacks=[*callbacks],
                   check_val_every_n_epoch=2, accumulate_grad_batches=accumulate,
                   enable_checkpointing=bool(callbacks))  # fmt: skip

    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(callbacks=(saves,)).save_checkpoint(tmp_path / "whole.ckpt")
    for epoch in range(3):
        run(tmp_path / f"epoch={epoch}.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("case", ["ppo", "dqn", "sac", "trpo"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_max_steps_ended_at_an_epochs_end_resumes_with_the_next(
    case: str, every: int, tmp_path: Path
) -> None:
    """It began with an epoch without batches, so that evaluations came at other steps."""
    make_model, make_data, _ = CASES[case]
    length = fit(make_model(), make_data(), max_epochs=1).num_training_batches
    evaluated: list[tuple[int, int]] = []

    class Evaluations(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            evaluated.append((trainer.current_epoch, trainer.global_step))

    def run(epochs: int, ckpt_path: Path | None = None) -> L.Trainer:
        data = make_data()
        data.eval_freq, data.n_eval_episodes, data.eval_on_start = 1, 1, False
        return fit(make_model(), data, ckpt_path, max_steps=epochs * length, callbacks=[Evaluations()],
                   check_val_every_n_epoch=every)  # fmt: skip

    run(4).save_checkpoint(tmp_path / "whole.ckpt")
    whole = evaluated[:]
    evaluated.clear()
    run(1).save_checkpoint(tmp_path / "part.ckpt")
    run(4, tmp_path / "part.ckpt").save_checkpoint(tmp_path / "resumed.ckpt")
    assert evaluated == whole
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def plateau(optimizer: Any) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=1e3)


class Plateau(PPO):
    """Halves its learning rate whenever an evaluation is no better."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau(optimizer), "monitor": "eval/mean_reward"}}  # fmt: skip


TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1}  # fmt: skip


def sft() -> SFT:
    return SFT(model_config=TINY, learning_rate=1e-2, lr_scheduler_type="constant")


def grpo() -> GRPO:
    return GRPO(model_config=TINY, learning_rate=1e-2, lr_scheduler_type="constant", max_completion_length=3)


def prompts(async_generations: int) -> PromptDataModule:
    return PromptDataModule(
        task="addition", n_train=8, n_eval=4, batch_size=4, num_generations=2, eval_steps=2, eval_on_start=False,
        reward_funcs=[f"{__name__}:digits"], async_generations=async_generations,
    )  # fmt: skip


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(str.isdigit, completion))) for completion in completions]


def with_evaluations(data: Any) -> Any:
    data.eval_freq, data.n_eval_episodes, data.eval_on_start = 1, 1, False
    return data


# Per case: module, datamodule, what is monitored, arguments of the Trainer, and steps with an evaluation and without.
DUE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, dict[str, int], list[int]]] = {
    "ppo": (lambda: Plateau(net_arch=[8], log_every=2), lambda: with_evaluations(CASES["ppo"][1]()),
            "eval/mean_reward", {"max_epochs": 4}, [4, 6, 8]),
    "dqn": (CASES["dqn"][0], lambda: with_evaluations(CASES["dqn"][1]()), "eval/mean_reward", {"max_epochs": 4},
            [4, 6]),
    "sft": (sft, lambda: InstructionDataModule(task="addition", n_train=16, n_eval=4, batch_size=4, eval_steps=2,
                                               eval_on_start=False),
            "eval/loss", {"max_steps": 9}, [2, 3, 4]),
    "grpo": (grpo, lambda: prompts(0), "eval/rewards/digits", {"max_steps": 9}, [4, 5, 8]),
    "grpo, written ahead": (grpo, lambda: prompts(1), "eval/rewards/digits", {"max_steps": 9}, [4, 5]),
}  # fmt: skip


@pytest.mark.parametrize("case", DUE)
def test_what_is_due_after_a_checkpoints_batch_is_done_by_the_run_that_resumes(case: str, tmp_path: Path) -> None:
    """Evaluations, callbacks that count them, checkpoints at them, and schedulers that wait for them."""
    make_model, make_data, metric, length, steps = DUE[case]
    mode = "min" if metric == "eval/loss" else "max"

    def run(name: str, ckpt_path: Path | None = None) -> tuple[Curves, int]:
        curves, stop = Curves(), EarlyStopping(metric, mode=mode, patience=100)
        saves = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        evaluated = ModelCheckpoint(tmp_path / name / "evaluated", "{step}", metric, save_top_k=-1)
        trainer = fit(make_model(), make_data(), ckpt_path, callbacks=[stop, saves, evaluated], logger=curves,
                      enable_checkpointing=True, **length)  # fmt: skip
        trainer.save_checkpoint(tmp_path / name / "last")
        return curves, stop.wait_count

    whole, waited = run("whole")
    for step in steps:
        rest, waited_too = run("rest", tmp_path / f"whole/step={step}.ckpt")
        assert waited_too == waited
        assert_equal_checkpoints(tmp_path / "whole/last", tmp_path / "rest/last")
        assert points(rest) <= points(whole)
        evaluations = {path.name for path in (tmp_path / "whole/evaluated").iterdir()}
        due = {f"step={at}.ckpt" for at in range(step, 100)} & evaluations
        assert (f"step={step}.ckpt" in due) == (step != steps[1])
        for name in due:
            assert_equal_checkpoints(tmp_path / "whole/evaluated" / name, tmp_path / "rest/evaluated" / name)
        if step != steps[1]:
            loops = [torch.load(tmp_path / run / f"evaluated/step={step}.ckpt", weights_only=True)["loops"]["fit_loop"]
                     for run in ("whole", "rest")]  # fmt: skip
            for progress in ("epoch_progress", "epoch_loop.batch_progress"):
                assert loops[0][progress] == loops[1][progress]
        shutil.rmtree(tmp_path / "rest")


@pytest.mark.parametrize("case", ["ppo", "dqn", "table"])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_an_extended_run_draws_a_rollout_s_values_once(case: str, epochs: int, tmp_path: Path) -> None:
    """Epochs of one batch: several learn from one rollout, whose scheduled values are in the point of the first."""
    make_model, make_data, _ = CASES[case]
    whole, first, rest = Curves(), Curves(), Curves()
    run = partial(fit, limit_train_batches=1)
    run(make_model(), make_data(), logger=whole, max_epochs=5).save_checkpoint(tmp_path / "whole")
    run(make_model(), make_data(), logger=first, max_epochs=epochs).save_checkpoint(tmp_path / "first")
    run(make_model(), make_data(), logger=rest, max_epochs=5, ckpt_path=tmp_path / "first")
    names = {name for name, *_ in whole.points if not name.startswith("time/")}
    drawn = [point[:2] for point in first.points + rest.points if point[0] in names]
    assert sorted(drawn) == sorted(point[:2] for point in whole.points if point[0] in names)
    assert {"train/clip_range", "rollout/exploration_rate"} & names


@pytest.mark.parametrize(("mode", "monitor"), [("max", "rollout/ep_rew_mean"), ("min", "train/loss")])
@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, PlateauOfLightning])
def test_a_scheduler_that_waits_for_a_metric_gets_one(kind: Any, mode: str, monitor: str) -> None:
    own = {"monitor": monitor} if kind is PlateauOfLightning else {}
    # Nothing is better by so much, so every epoch after the first halves the rate.
    scheduler = partial(kind, mode=mode, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs", **own)
    data = rollouts("CartPole-v1", n_envs=2, total_timesteps=96)
    trainer = fit(PPO(net_arch=[8], learning_rate=1e-2, lr_scheduler=scheduler), data)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 / 2 ** (trainer.current_epoch - 1) < 1e-2


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (PPO, lambda: rollouts("CartPole-v1", n_envs=2, total_timesteps=64)),
        (DQN, lambda: ReplayDataModule("CartPole-v1", **REPLAY)),
    ],
)
def test_weights_are_pruned(model: Any, data: Any) -> None:
    module = model(net_arch=[8])
    fit(module, data(), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])
    weights = [p for name, p in module.network.named_parameters() if p.dim() == 2]
    assert sum(int((p == 0).sum()) for p in weights) >= 0.4 * sum(p.numel() for p in weights)


def test_no_batch_per_step_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"trainer\.accumulate_grad_batches=0 must be at least 1"):
        fit(PPO(net_arch=[8]), rollouts("CartPole-v1", total_timesteps=64), accumulate_grad_batches=0)
