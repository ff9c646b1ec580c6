"""The evaluation before the first update: on every curve once, and without a trace in the training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from datamodules import InstructionDataModule, ReplayDataModule, RolloutDataModule
from rl_modules import DQN, PPO, SFT, QLearning
from tests.training import assert_equal_checkpoints, fit

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 16}  # fmt: skip


class Curves(DummyLogger):
    """Keeps every point."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[str, int, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.points += [(name, step, float(value)) for name, value in metrics.items()]

    def of(self, name: str) -> dict[int, float]:
        found = [(step, value) for tag, step, value in self.points if tag == name]
        assert len(dict(found)) == len(found), "no point comes twice"
        return dict(found)


def cartpole(**arguments: Any) -> RolloutDataModule:
    return RolloutDataModule(
        **{"env_id": "CartPole-v1", "n_envs": 2, "n_steps": 32, "batch_size": 64, "n_epochs": 2, "eval_freq": 64,
           "n_eval_episodes": 3, "total_timesteps": 256, **arguments}
    )  # fmt: skip


def sft_data(**arguments: Any) -> InstructionDataModule:
    return InstructionDataModule(**{"task": "addition", "n_train": 16, "n_eval": 8, "batch_size": 4, "eval_steps": 2,
                                    **arguments})  # fmt: skip


def sft() -> SFT:
    return SFT(model_config=SMALL, logging_steps=1, max_completion_length=4, lr_scheduler_type="constant")


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], str, int, dict[str, Any]]] = {
    "PPO": (PPO, cartpole, "eval/mean_reward", 64, {}),
    "DQN": (DQN, lambda **a: ReplayDataModule("CartPole-v1", learning_starts=16, total_timesteps=128, eval_freq=32,
                                              n_eval_episodes=3, **a), "eval/mean_reward", 32, {}),
    "QLearning": (QLearning, lambda **a: cartpole(env_id="FrozenLake-v1", batch_size=None, n_epochs=1, **a),
                  "eval/true_return", 64, {}),
    "SFT": (sft, sft_data, "eval/loss", 2, {"max_steps": 4}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_curves_begin_with_the_untrained_weights(name: str) -> None:
    make_model, make_data, metric, every, trainer = CASES[name]
    curves = Curves()
    fit(make_model(), make_data(), logger=curves, **trainer)
    points = curves.of(metric)
    assert min(points) == 0 and len(points) > 1
    assert all(step == 0 or step >= every for step in points)
    # The same weights, evaluated outside of a run.
    other = fit_nothing(make_model(), make_data())
    assert points[0] == pytest.approx(float(other[metric]), rel=1e-5)


def fit_nothing(model: Any, data: Any) -> Any:
    import lightning as L

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)  # fmt: skip
    trainer.validate(model, datamodule=data, verbose=False)
    return trainer.callback_metrics


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_with_and_without(name: str, tmp_path: Path) -> None:
    make_model, make_data, metric, _, trainer = CASES[name]
    for wanted in (True, False):
        curves = Curves()
        fit(make_model(), make_data(eval_on_start=wanted), logger=curves, **trainer).save_checkpoint(
            tmp_path / f"{wanted}.ckpt"
        )
        assert (0 in curves.of(metric)) == wanted
    left, right = tmp_path / "True.ckpt", tmp_path / "False.ckpt"
    assert differences_of_training(left, right) == []


def differences_of_training(left: Path, right: Path) -> list[str]:
    from tests.training import differences

    return [line for line in differences(left, right) if "eval_on_start" not in line]


@pytest.mark.long
@pytest.mark.parametrize("name", ["PPO", "SFT"])
def test_a_resumed_run_does_not_repeat_it(name: str, tmp_path: Path) -> None:
    make_model, make_data, metric, _, trainer = CASES[name]
    whole, part, rest = Curves(), Curves(), Curves()
    stop = {"max_steps": 3} if name == "SFT" else {"max_epochs": 2}
    fit(make_model(), make_data(), logger=whole, **trainer).save_checkpoint(tmp_path / "whole.ckpt")
    fit(make_model(), make_data(), logger=part, **stop).save_checkpoint(tmp_path / "part.ckpt")
    resumed = fit(make_model(), make_data(), logger=rest, ckpt_path=tmp_path / "part.ckpt", **trainer)
    resumed.save_checkpoint(tmp_path / "rest.ckpt")
    assert 0 in part.of(metric) and 0 not in rest.of(metric)
    assert not part.of(metric).keys() & rest.of(metric).keys()
    assert {**part.of(metric), **rest.of(metric)} == whole.of(metric)
    if name == "PPO":
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "rest.ckpt")


#: Without a TimeLimit of its own.
BARE = "gymnasium.envs.classic_control:CartPoleEnv"
LIMIT = {"class_path": "TimeLimit", "init_args": {"max_episode_steps": 20}}


@pytest.mark.parametrize(("arguments", "begins"), [
    ({"env_id": BARE}, False),
    ({"env_id": BARE, "wrappers": [LIMIT]}, True),
    ({"env_id": BARE, "wrappers": [LIMIT, "NormalizeReward"]}, True),
    ({"env_id": BARE, "eval_on_start": True}, True),
    ({"env_id": "CartPole-v1", "eval_freq": 0}, False),
    ({"env_id": "CartPole-v1", "eval_on_start": False}, False),
])  # fmt: skip
def test_it_waits_for_no_episode_without_an_end(arguments: dict[str, Any], begins: bool) -> None:
    curves = Curves()
    fit(PPO(), cartpole(**{"total_timesteps": 64, "eval_freq": 10**6, **arguments}), logger=curves)
    assert (0 in curves.of("eval/mean_reward")) == begins


@pytest.mark.parametrize(("asked", "begins"), [(None, False), (True, True)])
def test_a_trainer_with_a_schedule_of_its_own_begins_with_none_unless_asked(asked: bool | None, begins: bool) -> None:
    curves = Curves()
    fit(PPO(), cartpole(eval_on_start=asked), logger=curves, check_val_every_n_epoch=3)
    assert (0 in curves.of("eval/mean_reward")) == begins


@pytest.mark.long
def test_it_takes_no_part_in_choosing_the_best_checkpoint(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    save = ModelCheckpoint(tmp_path, monitor="eval/mean_reward", mode="min", save_top_k=-1)
    fit(PPO(), cartpole(), callbacks=[save], enable_checkpointing=True)
    assert save.best_k_models and not any("step=0" in path for path in save.best_k_models)
