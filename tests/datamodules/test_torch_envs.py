"""Environments in torch: each step is Gymnasium's, and a run on them learns and resumes exactly."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import datamodules  # noqa: F401 - registers the ids
from datamodules import RolloutDataModule
from datamodules.envs.torch import Maze, TorchEnv
from rl_modules import A2C, PPO
from tests.training import fit

N, STEPS = 16, 600
CLASSIC = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0")
#: One step in float64 is the same arithmetic in another order; in float32 it has 24 bits. Observations are float32.
TOLERANCE = {"float64": 1e-6, "float32": 5e-5}


def in_state(other: Any, env: TorchEnv, i: int) -> Any:
    """Gymnasium's environment in the state of the i-th in torch."""
    state = env.state[i].double().clone().numpy()
    other.unwrapped.state = np.float32(state) if "Continuous" in other.spec.id else state
    other.unwrapped.steps_beyond_terminated = None
    return other


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CLASSIC)
def test_each_step_is_gymnasiums(name, dtype):
    env: Any = gym.make_vec(f"torch/{name}", N, vectorization_mode="vector_entry_point", dtype=dtype)
    limit = gym.spec(name).max_episode_steps
    ends = {"terminated": 0, "truncated": 0}
    env.reset(seed=3)
    env.action_space.seed(0)
    others: Any = [gym.make(name, disable_env_checker=True) for _ in range(2)]
    for other in others:
        other.reset(seed=0)
    # Half of the cars are pushed in the direction of their speed, which climbs the hill; the others reach the limit.
    steps = STEPS if limit <= STEPS else limit + 20
    for t in range(steps):
        action = env.action_space.sample()
        if name.startswith("MountainCar"):
            way = np.sign(env.state[::2, 1].numpy())
            action[::2] = way + 1 if name.endswith("r-v0") else way[:, None]
        singles = [in_state(other, env, i) for other, i in zip(others, (t % N, (t + 5) % N), strict=True)]
        before = env.steps.clone()
        _, reward, terminated, truncated, info = env.step(torch.as_tensor(action))
        for i, other in zip((t % N, (t + 5) % N), singles, strict=True):
            observed, gained, ended, _, _ = other.unwrapped.step(action[i])
            np.testing.assert_allclose(info["final_obs"][i].numpy(), observed, atol=TOLERANCE[dtype], rtol=0)
            # Rewards are float32: squares of angles and speeds up to 16.
            np.testing.assert_allclose(float(reward[i]), gained, atol=2e-4, rtol=0)
            assert bool(terminated[i]) == ended
            assert bool(truncated[i]) == (int(before[i]) + 1 >= limit)
            ends["terminated"] += ended
            ends["truncated"] += bool(truncated[i])
    assert ends["truncated"] or name == "CartPole-v1"
    assert ends["terminated"] or name == "Pendulum-v1"


@pytest.mark.parametrize("name", CLASSIC)
def test_spaces_and_first_states_are_gymnasiums(name):
    env: Any = gym.make_vec(f"torch/{name}", 20_000, vectorization_mode="vector_entry_point")
    other = gym.make(name)
    assert env.single_observation_space == other.observation_space
    assert env.single_action_space == other.action_space
    first = env.reset(seed=0)[0].numpy()
    theirs = np.stack([other.reset(seed=i)[0] for i in range(2000)])
    assert first.dtype == theirs.dtype == np.float32
    # The standard error of the larger sample's moments is 1 % of the spread, that of the smaller 3 %.
    spread = theirs.std(0) + 1e-9
    np.testing.assert_allclose(first.mean(0) / spread, theirs.mean(0) / spread, atol=0.1)
    np.testing.assert_allclose(first.std(0), theirs.std(0), rtol=0.06, atol=1e-9)


def test_the_maze_is_the_mazes_table():
    layout = "S.#\n.TG\nS.."
    env = Maze(64, max_episode_steps=20, layout=layout, goal_reward=3.0)
    other: Any = gym.make("Maze-v0", layout=layout, goal_reward=3.0).unwrapped
    env.reset(seed=1)
    generator = torch.Generator().manual_seed(0)
    starts = {int(s) for s in np.flatnonzero(other.initial_state_distrib)}
    seen = set()
    for _ in range(200):
        before, action = env.state.clone(), torch.randint(4, (64,), generator=generator)
        after, reward, terminated, truncated, info = env.step(action)
        for i in range(64):
            [(_, successor, gained, ended)] = other.P[int(before[i])][int(action[i])]
            assert (int(info["final_obs"][i]), float(reward[i]), bool(terminated[i])) == (successor, gained, ended)
            if ended or truncated[i]:
                assert int(after[i]) in starts and int(env.steps[i]) == 0
                seen.add(int(after[i]))
    assert seen == starts


def test_an_ended_episode_begins_anew_and_its_successor_is_the_final_state():
    env: Any = gym.make_vec("torch/CartPole-v1", 4, vectorization_mode="vector_entry_point", max_episode_steps=3)
    env.reset(seed=0)
    env.state[0] = torch.tensor([2.39, 5.0, 0.0, 0.0])
    for t in range(1, 4):
        after, _, terminated, truncated, info = env.step(torch.ones(4, dtype=torch.int64))
        ended = [t == 1 and i == 0 for i in range(4)]
        assert terminated.tolist() == ended
        assert truncated.tolist() == [t == 3 and i > 0 for i in range(4)]
        assert float(info["final_obs"][0, 0]) > 2.4 if t == 1 else True
        assert bool((after[terminated | truncated].abs() <= 0.05).all())


@pytest.mark.parametrize(("module", "env_id"), [(PPO, "torch/CartPole-v1"), (A2C, "torch/Pendulum-v1")])
def test_a_run_resumes_exactly(module, env_id, tmp_path):
    def run(total: int, **more: Any) -> Any:
        data = RolloutDataModule(env_id, n_envs=4, n_steps=16, total_timesteps=total, eval_freq=0, seed=2,
                                 rollouts_per_epoch=2)  # fmt: skip
        return fit(module(), data, **more)

    whole, part = run(512), run(256)
    part.save_checkpoint(tmp_path / "part.ckpt")
    again = run(512, ckpt_path=tmp_path / "part.ckpt")
    for name, x in whole.lightning_module.state_dict().items():
        assert torch.equal(x, again.lightning_module.state_dict()[name]), name
    means = [run.datamodule.metrics().get("rollout/ep_rew_mean") for run in (whole, again)]
    assert means[0] == means[1]
    assert whole.datamodule.partial_return == again.datamodule.partial_return != 0


def test_evaluation_plays_gymnasiums_environment():
    data = RolloutDataModule("torch/CartPole-v1", n_envs=4, n_steps=16, total_timesteps=64, eval_freq=64)
    trainer = fit(PPO(), data)
    assert 8 <= float(trainer.callback_metrics["eval/mean_ep_length"]) <= 500
    data.setup("fit")
    assert not isinstance(data.environments.for_evaluation(1), TorchEnv)
    assert isinstance(data.environments.for_training(1), TorchEnv)
    data.teardown("fit")
