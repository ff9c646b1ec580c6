"""Schedules against closed forms, where they are used, and the success rate."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from datamodules import RolloutDataModule
from rl_modules import A2C, PPO, PQN, REINFORCE, TRPO
from rl_modules.common.errors import UsageError
from rl_modules.common.schedules import parse_schedule, schedule_value
from tests.training import fit, rollouts


@pytest.mark.parametrize(
    ("text", "values"),
    [(0.5, [0.5, 0.5, 0.5, 0.5, 0.5]), ("lin_2", [2.0, 1.5, 1.0, 0.5, 0.0]),
     ("cosine_2", [1 + math.cos(math.pi * x) for x in (0, 0.25, 0.5, 0.75, 1)]),
     ("0:4, 0.5:2, 1:0", [4.0, 3.0, 2.0, 1.0, 0.0]), ("0.25:8,0.75:4", [8.0, 8.0, 6.0, 4.0, 4.0]),
     ("0.5:1e-3", [1e-3] * 5)],
)  # fmt: skip
def test_values_at_the_quarters(text: Any, values: list[float]) -> None:
    schedule = parse_schedule(text, "x")
    assert [schedule_value(schedule, 1 - done) for done in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(values)
    assert schedule.initial == pytest.approx(values[0])
    assert schedule_value(schedule, -0.1) == pytest.approx(values[-1])  # the last rollout may go beyond


@pytest.mark.parametrize("text", ["linear", "lin_", "cosine_x", "-1", "0:1,0:2", "0.5:1,0.2:2", "0:1,2:3", "0:-1",
                                  "0:1:2", "inf", "nan"])  # fmt: skip
def test_anything_else_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="clip_range=.* is no schedule; give a number"):
        PPO(clip_range=text)


@pytest.mark.parametrize(
    "function",
    [
        lambda left: 3e-4 * left,
        lambda left: 2.0 * left**3,
        lambda left: 1e-3 * math.sin(3 * left) ** 2,
        lambda left: max(0.1, left),
        lambda left: 7.0,
    ],
)
def test_a_function_of_the_remaining_progress_becomes_points(function: Any) -> None:
    model = PPO(learning_rate=function, clip_range=function)
    assert model.clip_range == pytest.approx(max(function(1.0), 1e-6), rel=1e-5)
    for notation in (model.hparams["learning_rate"], model.hparams["clip_range"]):
        schedule = parse_schedule(notation, "x")
        for left in np.linspace(0, 1, 137):
            error = abs(schedule_value(schedule, left) - function(left))
            assert error < 2e-4 * max(function(x / 100) for x in range(101))
    assert len(str(model.hparams["learning_rate"])) < 4000
    with pytest.raises(UsageError, match="learning_rate='0:-2, 1:-1' is no schedule"):
        PPO(learning_rate=lambda left: -1.0 - left)


def test_a_checkpoint_holds_the_points_of_a_function(tmp_path: Any) -> None:
    model = PPO(learning_rate=lambda left: 1e-3 * left)
    trainer = fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=8, total_timesteps=32))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)
    assert PPO.load_from_checkpoint(tmp_path / "last.ckpt").learning_rate == "0:0.001, 1:0"


@pytest.mark.parametrize("cls", [PPO, A2C, REINFORCE])
def test_the_entropy_coefficient_follows_its_schedule_anew_in_each_fit(cls: Any) -> None:
    seen: list[float] = []

    class Watched(cls):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.ent_coef)
            return super().training_step(batch, batch_idx)

    model = Watched(ent_coef="0:0.4, 1:0.2", learning_rate="cosine_1e-3")
    for _ in range(2):
        seen.clear()
        fit(model, rollouts("CartPole-v1", n_envs=4, n_steps=8, total_timesteps=128))
        assert seen == pytest.approx([0.35, 0.3, 0.25, 0.2])
    rate = model.trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("cls", "arguments", "ends"),
    [
        (PPO, {"learning_rate": "lin_1e-3", "clip_range": "0:0.2, 1:0.1", "ent_coef": "cosine_0.4"},
         {"clip_range": 0.1, "ent_coef": 0.0}),
        (A2C, {"learning_rate": "lin_1e-3"}, {}),
        (TRPO, {"target_kl": "lin_0.02"}, {"target_kl": 2e-5}),
        (PQN, {"learning_rate": "lin_1e-3", "exploration_fraction": 1.0, "exploration_final_eps": 0.1},
         {"exploration_rate": 0.1}),
    ],
)  # fmt: skip
def test_the_share_that_is_left_ends_at_zero_though_the_last_rollout_goes_beyond(
    cls: Any, arguments: dict[str, Any], ends: dict[str, float]
) -> None:
    seen: list[float] = []

    class Watched(cls):  # type: ignore[misc]
        def update_schedules(self, progress_remaining: float) -> None:
            seen.append(progress_remaining)
            super().update_schedules(progress_remaining)

    model, data = Watched(**arguments), rollouts("CartPole-v1", n_envs=4, n_steps=8, total_timesteps=80)
    fit(model, data)
    assert data.num_timesteps == 96
    assert seen == pytest.approx([1.0, 0.6, 0.2, 0.0])
    assert seen[-1] == model.progress_remaining == 0.0
    assert {name: getattr(model, name) for name in ends} == pytest.approx(ends)
    if "learning_rate" in arguments:
        assert model.trainer.optimizers[0].param_groups[0]["lr"] == 0.0


class Door(gym.Env):
    """Ends after three steps, in a success where the last action was 1."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        over = self.t == 3
        return np.zeros(1, np.float32), float(over and action == 1), over, False, {"is_success": over and action == 1}


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_success_rate_is_that_of_the_episodes_ends(mode: str, vectorization: str) -> None:
    data = rollouts(Door, n_envs=2, n_steps=30, total_timesteps=60, autoreset_mode=mode,
                    vectorization_mode=vectorization)  # fmt: skip
    fit(PPO(), data)
    episodes = data.collector.episodes
    assert len(episodes.successes) == len(episodes.returns) > 10
    # The reward says the same.
    assert list(episodes.successes) == list(episodes.returns)
    assert data.metrics()["rollout/success_rate"] == pytest.approx(np.mean(episodes.returns))


class TellsSuccess(Door):
    """As ``Door``, with the key in the infos of successes only."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        *returned, info = super().step(action)
        return *returned, info if info["is_success"] else {}  # type: ignore[return-value]


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_an_episode_that_says_nothing_of_success_failed_where_others_say_it(mode: str) -> None:
    data = rollouts(TellsSuccess, n_envs=2, n_steps=30, total_timesteps=60, autoreset_mode=mode)
    fit(PPO(), data)
    episodes = data.collector.episodes
    assert 0 < np.mean(episodes.returns) < 1
    assert list(episodes.successes) == list(episodes.returns)
    assert data.metrics()["rollout/success_rate"] == pytest.approx(np.mean(episodes.returns))


def test_no_success_rate_where_nobody_says() -> None:
    data = RolloutDataModule("CartPole-v1", total_timesteps=256, n_steps=32, eval_freq=0)
    fit(PPO(), data)
    assert "rollout/success_rate" not in data.metrics()
