"""Stable-Baselines3 is given the settings of the configs that it is compared on."""

from typing import Any

import gymnasium as gym
import pytest

from benchmarks import peers, results

pytest.importorskip("sb3_contrib", reason="needs the test extra")

COMPARED = [row for row in results.ROWS.values() if list((results.STORE / row.config / results.PEER).glob("*.json"))]


def test_a_config_becomes_the_peers_arguments() -> None:
    task = peers.contest(results.ROWS["a2c/lunarlander"])
    rate = task.arguments.pop("learning_rate")
    assert task.algorithm.__name__ == "A2C" and task.algorithm.__module__.startswith("stable_baselines3")
    assert task.arguments == {"gamma": 0.995, "ent_coef": 1e-5, "n_steps": 5}
    assert [rate(1.0), rate(0.5), rate(0.0)] == pytest.approx([8.3e-4, 4.15e-4, 0.0])
    assert (task.env_id, task.n_envs, task.total_timesteps) == ("LunarLander-v3", 8, 200_000)
    assert not task.norm_obs and not task.norm_reward


def test_arguments_of_the_policy_and_of_the_noise_reach_them() -> None:
    quantiles = peers.contest(results.ROWS["qrdqn/acrobot"]).arguments["policy_kwargs"]
    assert quantiles == {"n_quantiles": 25, "net_arch": [256, 256]}
    noise: Any = peers.contest(results.ROWS["td3/pendulum"]).arguments["action_noise"]
    assert noise._mu == pytest.approx([0.0]) and noise._sigma == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("c51/cartpole", "have no C51"),
        ("dqn/cartpole", "DQN of the peer has no double, dueling"),
        ("ppo/invalid_actions", "is an import path"),
    ],
)
def test_what_the_peer_lacks_is_refused(row: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        peers.contest(results.ROWS[row])


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.config)
def test_compared_rows_are_learned_by_the_peer_in_its_own_vector(row: results.Row) -> None:
    task = peers.contest(row)
    try:
        gym.make(task.env_id).close()
    except gym.error.DependencyNotInstalled as error:
        pytest.skip(str(error))
    envs = task.environments(task.n_envs, 0, task.arguments.get("gamma", 0.99))
    model = task.algorithm("MlpPolicy", envs, seed=0, device="cpu", **task.arguments)
    assert model.n_envs == task.n_envs
    envs.close()
