"""Environments in JAX: a small one against NumPy, and Brax's and MuJoCo Playground's where they are installed."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

pytest.importorskip("jax")

import jax
from jax import numpy as jnp

from datamodules import ReplayDataModule, RolloutDataModule
from datamodules.envs.jax import JaxVector
from rl_modules import PPO, SAC
from tests.training import assert_resumes_exactly, fit

LENGTH = 5


class State(NamedTuple):
    obs: Any
    reward: Any
    done: Any


class Drift:
    """A point on a line: it starts in [0, 1], moves by the action and ends above 1.5."""

    action_size = 1

    def reset(self, key: Any) -> State:
        zero = jnp.zeros(())
        return State(jnp.stack([jax.random.uniform(key), zero]), zero, zero)

    def step(self, state: State, action: Any) -> State:
        x, t = state.obs
        moved = x + action[0]
        return State(jnp.stack([moved, t + 1]), -moved, (moved > 1.5).astype(jnp.float32))


def drifts(num_envs: int = 4) -> JaxVector:
    return JaxVector(Drift(), num_envs, LENGTH)


def test_steps_ends_and_final_observations_are_those_of_a_simulation_by_hand() -> None:
    envs, rng = drifts(3), np.random.default_rng(0)
    now = envs.reset(seed=0)[0].numpy().copy()
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert ((now[:, 0] >= 0) & (now[:, 0] <= 1)).all() and len({*now[:, 0].tolist()}) == 3
    ends = cuts = 0
    for _ in range(40):
        action = rng.uniform(-0.2, 0.6, (3, 1)).astype(np.float32)
        observation, reward, terminated, truncated, info = envs.step(torch.from_numpy(action))
        wanted = now + np.concatenate([action, np.ones((3, 1), np.float32)], 1)
        np.testing.assert_allclose(info["final_obs"], wanted, rtol=1e-6)
        np.testing.assert_allclose(reward, -wanted[:, 0], rtol=1e-6)
        assert terminated.tolist() == (wanted[:, 0] > 1.5).tolist()
        assert truncated.tolist() == (wanted[:, 1] >= LENGTH).tolist()
        done = (terminated | truncated).numpy()
        now = observation.numpy().copy()
        np.testing.assert_array_equal(now[~done], info["final_obs"].numpy()[~done])
        assert (now[done, 1] == 0).all() and ((now[done, 0] >= 0) & (now[done, 0] <= 1)).all()
        ends, cuts = ends + int(terminated.sum()), cuts + int(truncated.sum())
    assert ends > 3 and cuts > 3


def rollouts(make: Any = drifts, **settings: Any) -> RolloutDataModule:
    given = {"n_steps": 16, "n_epochs": 2, "batch_size": 32, "total_timesteps": 256, "eval_freq": 128,
             "n_eval_episodes": 2, "rollouts_per_epoch": 1}  # fmt: skip
    return RolloutDataModule(make, **{**given, **settings})


def test_a_resumed_run_equals_the_whole_one(tmp_path: Any) -> None:
    """The simulator's state and random keys are in the checkpoint."""
    assert_resumes_exactly(lambda: PPO(net_arch=[8]), rollouts, tmp_path)


def test_a_policy_learns_to_stay_low_and_a_replay_buffer_stores_arrays() -> None:
    data = rollouts(env_kwargs={"num_envs": 16}, n_steps=32, batch_size=128, total_timesteps=16_384, eval_freq=0)
    model = PPO(learning_rate=3e-3, net_arch=[16])
    fit(model, data)
    assert data.metrics()["rollout/ep_rew_mean"] > 8  # of at most 14: it moves by at most 1 in each of 5 steps
    fit(SAC(net_arch=[8]), ReplayDataModule(drifts, total_timesteps=200, learning_starts=100, eval_freq=0))


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "name", "package"), [
    ("brax", "inverted_pendulum", "brax"), ("playground", "CartpoleBalance", "mujoco_playground"),
])  # fmt: skip
def test_environments_of_others_train_and_resume(suite: str, name: str, package: str, tmp_path: Any) -> None:
    pytest.importorskip(package)
    made = {"name": name, "num_envs": 4, "episode_length": 20}
    settings = {"make": f"datamodules.envs.jax:{suite}", "env_kwargs": made, "eval_freq": 0}
    assert_resumes_exactly(lambda: PPO(net_arch=[8]), lambda: rollouts(**settings), tmp_path)
