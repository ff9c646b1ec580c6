"""Rollouts that are collected while the one before them trains."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from datamodules import RolloutDataModule
from rl_modules import A2C, PPO, PQN, REINFORCE, TRPO, RecurrentPPO
from rl_modules.common.errors import UsageError
from tests.datamodules.envs import Counter
from tests.training import assert_resumes_exactly, differences, fit

SIZES = {"n_envs": 4, "n_steps": 16, "batch_size": 16, "n_epochs": 2, "eval_freq": 0, "overlap": True}


def rollouts(env_id: Any = "CartPole-v1", **arguments: Any) -> RolloutDataModule:
    return RolloutDataModule(env_id, **{**SIZES, "total_timesteps": 5 * 64, "rollouts_per_epoch": 1, **arguments})


class Watched(PPO):
    """Keeps the weights at the start of each rollout's training, and the rollout."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.weights: list[dict[str, torch.Tensor]] = []
        self.rollouts: list[Any] = []
        self.counted: list[int] = []
        self.finished: list[int] = []

    def prepare(self, rollout: Any) -> dict[str, Any]:
        self.weights.append({name: x.clone() for name, x in self.network.state_dict().items()})
        self.rollouts.append(rollout)
        self.counted.append(self.source.num_timesteps)
        self.finished.append(len(self.trainer.datamodule.collector.episodes.returns))
        return super().prepare(rollout)


def test_a_rollout_is_collected_with_the_weights_before_the_last_update() -> None:
    model = Watched(learning_rate=0.01)
    fit(model, rollouts())
    assert len(model.rollouts) == 5
    # The first is collected before any training, and the second while the first trains: both by the initial weights.
    for rollout, acting in zip(model.rollouts, [0, 0, 1, 2, 3], strict=True):
        model.network.load_state_dict(model.weights[acting])
        with torch.no_grad():
            policy, value = model.policy_and_value(rollout["observation"].flatten(0, 1))
        torch.testing.assert_close(policy.log_prob(rollout["action"].flatten()), rollout["log_prob"].flatten())
        torch.testing.assert_close(value, rollout["value"].flatten())
    assert not torch.equal(*(model.weights[i]["policy_head.weight"] for i in (0, 1)))


def test_successive_rollouts_follow_each_other_and_counts_are_of_the_rollout_in_training() -> None:
    model, ends = Watched(), []
    data = rollouts(Counter)
    fit(model, data)
    assert model.counted == [64, 128, 192, 256, 320]
    for first, second in zip(model.rollouts, model.rollouts[1:], strict=False):
        ongoing = ~(first["terminated"] | first["truncated"])[-1]
        assert torch.equal(first["next_observation"][-1][ongoing], second["observation"][0][ongoing])
    for rollout in model.rollouts:
        ends.append(int((rollout["terminated"] | rollout["truncated"]).sum()) + (ends[-1] if ends else 0))
    assert model.finished == ends


class Tempered(PPO):
    """Acts and learns with a temperature of its own: a parameter of the module itself, and a buffer that counts."""

    def build_network(self) -> None:
        super().build_network()
        self.log_temperature = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("n_updates", torch.zeros((), dtype=torch.int64))
        self.acted: list[tuple[float, int]] = []
        self.trained: list[tuple[float, int]] = []

    def act(self, observation: Any, generator: Any = None, deterministic: bool = False) -> dict[str, Any]:
        self.acted.append((self.log_temperature.item(), int(self.n_updates)))
        return super().act(observation, generator, deterministic)

    def policy_loss(self, log_prob: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return super().policy_loss(log_prob * self.log_temperature.exp(), batch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.trained.append((self.log_temperature.item(), int(self.n_updates)))
        self.n_updates += 1
        return super().training_step(batch, batch_idx)


def test_a_parameter_of_the_module_itself_trains_and_the_copy_acts_with_its_value_before_the_update() -> None:
    model = Tempered(learning_rate=0.01)
    fit(model, rollouts())
    assert model.log_temperature.requires_grad
    assert len({temperature for temperature, _ in model.trained}) == 5 * 8  # every update moves it
    # The copy acts with what was there when its rollout was begun: 16 steps, and once for the last state's value.
    assert model.acted == [model.trained[8 * rollout] for rollout in (0, 0, 1, 2, 3) for _ in range(17)]


class Noted(PQN):
    """Notes the exploration rate that each rollout begins with."""

    rates: list[float]

    def act(self, observation: Any, generator: Any = None, deterministic: bool = False) -> dict[str, Any]:
        self.rates.append(self.exploration_rate)
        return super().act(observation, generator, deterministic)


@pytest.mark.long
def test_a_rate_that_falls_reaches_the_rollouts_that_are_collected_ahead() -> None:
    seen: dict[bool, list[float]] = {}
    for overlap in (False, True):
        model = Noted(net_arch=[8])
        model.rates = []
        fit(model, rollouts(total_timesteps=10 * 64, overlap=overlap))
        seen[overlap] = model.rates[:: SIZES["n_steps"]]
    # One update old, as the weights are.
    assert seen[True][:10] == [seen[False][0], *seen[False][:9]]
    assert seen[True][-1] < 0.5


@pytest.mark.long
def test_a_falling_rate_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: PQN(net_arch=[8]), rollouts, tmp_path, epochs=3)


@pytest.mark.long
def test_the_last_rollout_is_not_followed_by_another() -> None:
    data = rollouts(Counter)
    fit(PPO(), data)
    assert data._next is None
    assert data.num_timesteps == 320


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{}, {"norm_obs": True, "norm_reward": True}, {"vectorization_mode": "async"},
                                       {"autoreset_mode": "next_step"}], ids=str)  # fmt: skip
def test_resumes_exactly_after_each_rollout(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes_exactly(PPO, lambda: rollouts(**arguments), tmp_path)


@pytest.mark.long
def test_resumes_exactly_within_a_rollout(tmp_path: Path) -> None:
    def run(steps: int, resume: Path | None = None) -> Path:
        path = tmp_path / f"{steps}{'r' if resume else ''}.ckpt"
        fit(PPO(), rollouts(rollouts_per_epoch=5), resume, max_steps=steps).save_checkpoint(path)
        return path

    whole = run(30)
    for stop in (3, 8, 11):
        # Lightning counts the epoch that a resumed run stops in once more.
        assert [x for x in differences(whole, run(30, run(stop))) if not x.startswith("/epoch")] == []


@pytest.mark.long
def test_state_dependent_noise_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: PPO(use_sde=True, sde_sample_freq=4), lambda: rollouts("Pendulum-v1"), tmp_path,
                           epochs=3)  # fmt: skip


@pytest.mark.long
def test_a_policy_with_memory_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: RecurrentPPO(lstm_hidden_size=8), rollouts, tmp_path, epochs=3)


@pytest.mark.long
def test_without_overlap_a_resumed_run_first_learns_from_the_rollout_that_was_collected(tmp_path: Path) -> None:
    fit(Watched(), rollouts(), max_epochs=2).save_checkpoint(tmp_path / "part.ckpt")
    saved = torch.load(tmp_path / "part.ckpt", weights_only=True)
    (key,) = (name for name in saved if "DataModule" in name)
    pending = saved[key]["ranks"][0]["next"]
    model, data = Watched(), rollouts(overlap=False)
    fit(model, data, ckpt_path=tmp_path / "part.ckpt")
    assert torch.equal(model.rollouts[0]["action"], pending["action"])
    assert model.counted == [192, 256, 320]


@pytest.mark.long
def test_other_settings_after_a_rollout_that_was_collected_ahead(tmp_path: Path) -> None:
    fit(PPO(), rollouts(), max_epochs=2).save_checkpoint(tmp_path / "part.ckpt")
    sentence = r"n_steps=8 \(it has 16\): the checkpoint holds experience of the next epoch"
    with pytest.raises(UsageError, match=sentence):
        fit(PPO(), rollouts(n_steps=8), ckpt_path=tmp_path / "part.ckpt")
    data = rollouts(batch_size=32)
    fit(PPO(), data, ckpt_path=tmp_path / "part.ckpt")
    assert data.num_timesteps == 320
    # Nothing is collected after the last rollout, so that a finished run resumes with other settings.
    fit(Watched(), rollouts()).save_checkpoint(tmp_path / "whole.ckpt")
    model = Watched()
    fit(model, rollouts(n_steps=8, total_timesteps=384), ckpt_path=tmp_path / "whole.ckpt")
    assert [len(rollout["reward"]) for rollout in model.rollouts] == [8, 8]


class Fails(Counter):
    """Fails in its 40th step."""

    steps = 0

    def step(self, action: Any) -> Any:
        Fails.steps += 1
        if Fails.steps > 300:
            raise ValueError("the arm is broken")
        return super().step(action)


def test_an_environment_that_fails_in_the_thread_ends_the_run_with_its_sentence() -> None:
    Fails.steps = 0
    with pytest.raises(UsageError, match="the arm is broken"):
        fit(PPO(), rollouts(Fails, total_timesteps=10_000))


class Slow(Counter):
    steps = 0

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        type(self).steps += 1
        return super().step(action)


@pytest.mark.long
def test_a_fit_after_an_error_does_not_share_the_vector_with_the_thread_of_the_one_before() -> None:
    class Interrupts(L.Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            raise KeyError("by a callback, while the second rollout is collected")

    def make() -> SyncVectorEnv:
        return SyncVectorEnv([Slow], autoreset_mode=AutoresetMode.SAME_STEP)

    one, other = (rollouts(make, n_envs=1, total_timesteps=48) for _ in range(2))
    with pytest.raises(KeyError):
        fit(PPO(), one, callbacks=[Interrupts()])
    assert Slow.steps == 2 * one.n_steps
    again, first = Watched(), Watched()
    fit(again, one)
    fit(first, other)
    for mine, fresh in zip(again.rollouts, first.rollouts, strict=True):
        assert torch.equal(mine["observation"], fresh["observation"])


@pytest.mark.parametrize("algorithm", [A2C, REINFORCE, TRPO])
def test_algorithms_of_the_current_policy_alone_refuse_it(algorithm: Any) -> None:
    data = RolloutDataModule("CartPole-v1", eval_freq=0, overlap=True)
    with pytest.raises(UsageError, match=rf"overlap=True .* {algorithm.__name__}'s update .* leave overlap out"):
        fit(algorithm(), data)


def test_double_precision_refuses_it() -> None:
    with pytest.raises(UsageError, match="precision=64-true"):
        fit(PPO(), rollouts(), precision="64-true")


@pytest.mark.long
def test_bf16_mixed_collects_as_it_does_without_a_thread() -> None:
    one, other = Watched(), Watched()
    fit(one, rollouts(), precision="bf16-mixed")
    fit(other, rollouts(overlap=False), precision="bf16-mixed")
    for i in (0, 1):
        same = torch.equal(one.rollouts[i]["log_prob"], other.rollouts[i]["log_prob"])
        assert same == (i == 0)
    assert one.rollouts[1]["log_prob"].dtype == torch.float32
