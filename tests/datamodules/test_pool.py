"""EnvPool's engines: the same bookkeeping as Gymnasium's environments, and the same transitions from the same state."""

import importlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.collector import Collector
from datamodules.envs.vector import make_vector_env
from rl_modules import DQN, PPO, RecurrentPPO
from rl_modules.common.errors import UsageError
from tests.training import fit, rollouts

pytest.importorskip("envpool")
CPU = torch.device("cpu")


def act(observation: Any, generator: Any) -> Any:
    n = len(observation)
    return {"action": torch.randint(2, (n,), generator=generator), "value": observation.sum(1)}


def collect(n_envs: int = 3, steps: int = 120, env_id: str = "CartPole-v1", **env_kwargs: Any) -> Any:
    envs = make_vector_env(env_id, n_envs, "envpool", env_kwargs=env_kwargs)
    collector = Collector(envs, list(range(10, 10 + n_envs)), 1, "test")
    rollout = collector.collect(act, steps, CPU)
    collector.close()
    return rollout, collector


def test_a_vector_of_envpools_own_trains_as_any_other() -> None:
    """Its class is a ``gym.Env`` too."""
    envs = importlib.import_module("envpool").make("CartPole-v1", env_type="gymnasium", num_envs=3)
    data = rollouts(envs, n_steps=16, total_timesteps=96, eval_freq=0)
    fit(PPO(), data)
    assert data.n_envs == 3 and data.num_timesteps >= 96 and data.collector.mode == AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("limit", [500, 6])
def test_rows_are_the_transitions_of_gymnasiums_cartpole(limit: int) -> None:
    """Each transition is repeated in Gymnasium from the same state, flags and final observations included."""
    rollout, _ = collect(max_episode_steps=limit)
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    ends = 0
    for i in range(3):
        length = 0
        for t in range(120):
            if not rollout["valid"][t, i]:
                assert ends and rollout["reward"][t, i] == 0 and not rollout["terminated"][t, i]
                continue
            env.state = tuple(rollout["observation"][t, i].double().tolist())
            env.steps_beyond_terminated = None
            observation, reward, terminated, _, _ = env.step(int(rollout["action"][t, i]))
            length += 1
            np.testing.assert_allclose(rollout["next_observation"][t, i], observation, atol=1e-5)
            assert rollout["reward"][t, i] == reward
            # The state was rounded to float32: at the very edge the flag may come a step later.
            near = abs(abs(observation[2]) - 0.2094395) < 1e-5 or abs(abs(observation[0]) - 2.4) < 1e-5
            assert near or bool(rollout["terminated"][t, i]) == terminated
            truncated = length == limit
            assert bool(rollout["truncated"][t, i]) == (truncated and not terminated) or terminated
            value = rollout["next_observation"][t, i].sum()
            torch.testing.assert_close(rollout["next_value"][t, i], value)
            if terminated or truncated:
                ends, length = ends + 1, 0
                assert t == 119 or not rollout["valid"][t + 1, i]
    assert ends > 5


def test_statistics_count_what_gymnasium_would() -> None:
    rollout, collector = collect(max_episode_steps=6)
    assert set(collector.episodes.lengths) == {6} and set(collector.episodes.returns) == {6.0}
    assert (rollout["truncated"].sum() == len(collector.episodes.lengths)) and not rollout["terminated"].any()


def test_infos_of_an_episodes_end_are_those_of_its_last_step() -> None:
    envs = make_vector_env("CartPole-v1", 3, "envpool", env_kwargs={"max_episode_steps": 20})
    collector, heard = Collector(envs, [10, 11, 12], 1, "test"), []
    collector.episodes.info_keywords = ("elapsed_step",)
    collector.episodes.on_finished = lambda total, length, steps: heard.append((length, steps))
    collector.collect(act, 120, CPU)
    collector.close()
    assert len(heard) > 10 and all(length == steps for length, steps in heard)


def test_pendulums_transitions() -> None:
    envs = make_vector_env("Pendulum-v1", 2, "envpool")
    observation, _ = envs.reset(seed=[3, 4])
    env: Any = gym.make("Pendulum-v1").unwrapped
    env.reset(seed=0)
    for action in np.linspace(-2, 2, 20, dtype=np.float32):
        theta = np.arctan2(observation[0, 1], observation[0, 0])
        env.state = np.array([theta, observation[0, 2]], np.float64)
        expected, reward, *_ = env.step(np.array([action]))
        observation, rewards, *_ = envs.step(np.full((2, 1), action, np.float32))
        np.testing.assert_allclose(observation[0], expected, atol=2e-3)
        assert rewards[0] == pytest.approx(reward, abs=1e-3)
    envs.close()


def test_seeds_are_private() -> None:
    def first(seed: int) -> Any:
        envs = make_vector_env("CartPole-v1", 4, "envpool")
        observation = envs.reset(seed=seed)[0].copy()
        envs.close()
        return observation

    np.random.seed(0)  # noqa: NPY002
    first(1)
    drawn = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    assert drawn == np.random.random()  # noqa: NPY002
    assert (first(1) == first(1)).all() and (first(1) != first(2)).all()
    assert len(np.unique(first(1)[:, 0])) == 4


@pytest.mark.long
@pytest.mark.parametrize("model", [PPO, lambda: RecurrentPPO(lstm_hidden_size=8)], ids=["PPO", "RecurrentPPO"])
def test_training_and_evaluation(model: Any) -> None:
    data = RolloutDataModule("CartPole-v1", n_envs=4, n_steps=32, batch_size=32, n_epochs=2, total_timesteps=512,
                             vectorization_mode="envpool", eval_freq=256, n_eval_episodes=2)  # fmt: skip
    made = model()
    trainer = fit(made, data)
    assert data.num_timesteps >= 512
    assert trainer.test(made, datamodule=data, verbose=False)[0]["test/mean_reward"] > 0
    runs = []
    for _ in range(2):
        again = model()
        fit(again, rollouts("CartPole-v1", n_envs=4, total_timesteps=256, vectorization_mode="envpool"))
        runs.append(torch.cat([p.detach().flatten() for p in again.parameters()]))
    assert torch.equal(runs[0], runs[1])


def test_replay() -> None:
    data = ReplayDataModule("Acrobot-v1", n_envs=4, buffer_size=1000, learning_starts=100, total_timesteps=400,
                            vectorization_mode="envpool", eval_freq=0)  # fmt: skip
    fit(DQN(), data)
    assert data.num_timesteps >= 400


def test_a_resumed_run_says_that_its_episodes_begin_anew(tmp_path: Path) -> None:
    def data() -> Any:
        return rollouts("CartPole-v1", n_envs=2, vectorization_mode="envpool")

    fit(PPO(), data(), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="start a new episode, because its engine has no state to restore"):
        fit(PPO(), data(), ckpt_path=tmp_path / "a.ckpt", max_epochs=2)


@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [("CartPole-v2", {}, "env_id='CartPole-v2' has no engine in EnvPool"),
     ("CartPole-v1", {"env_kwargs": {"nonsense": 1}}, "env_kwargs do not fit EnvPool's CartPole-v1"),
     ("CartPole-v1", {"wrappers": ["FlattenObservation"]}, "wrappers are for single environments"),
     ("Taxi-v3", {"masks": "info"}, "action masks are for single environments.*action_masks=False"),
     (lambda: gym.make("CartPole-v1"), {}, "has no engine in EnvPool")],
)  # fmt: skip
def test_mistakes_are_one_sentence(env_id: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_vector_env(env_id, 2, "envpool", **arguments)
