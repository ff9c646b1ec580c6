"""What every policy-gradient algorithm must get right, on environments whose answers are known."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_modules import A2C, PPO, REINFORCE, TRPO
from tests import envs
from tests.marks import quick
from tests.training import fit, mean_return, rollouts

GAMMA = 0.5
PROBES = {
    "REINFORCE": lambda: REINFORCE(psi="baseline", gamma=GAMMA, learning_rate=0.01),
    "VPG": lambda: REINFORCE(psi="advantage", gamma=GAMMA, learning_rate=0.01),
    "A2C": lambda: A2C(gamma=GAMMA, learning_rate=0.01),
    "PPO": lambda: PPO(gamma=GAMMA, learning_rate=0.01),
    "PPO penalty": lambda: PPO(gamma=GAMMA, learning_rate=0.01, policy_objective="penalty", target_kl=0.1),
    "TRPO": lambda: TRPO(gamma=GAMMA, learning_rate=0.01, target_kl=0.05, n_critic_updates=5),
}
#: The others run with the slow tests.
QUICK = ("REINFORCE", "PPO")


def value(model: Any, observation: float) -> float:
    with torch.no_grad():
        return model.act(torch.tensor([[observation]]))["value"].item()


def probability_of_one(model: Any, observation: float) -> float:
    with torch.no_grad():
        policy = model.policy if isinstance(model, TRPO) else lambda x: model.network(x)[0]
        return policy(torch.tensor([[observation]])).log_prob(torch.tensor([1])).exp().item()


@pytest.fixture(params=quick(PROBES, *QUICK))
def trained(request: pytest.FixtureRequest) -> Callable[[Callable[[], gym.Env]], Any]:
    def train(make_env: Callable[[], gym.Env]) -> Any:
        model = PROBES[request.param]()
        fit(model, rollouts(make_env, n_envs=4, n_steps=16, total_timesteps=3200, rollouts_per_epoch=50))
        return model

    return train


@pytest.mark.long
def test_value_of_a_constant_reward(trained: Any) -> None:
    assert value(trained(envs.make_constant_reward), 0.0) == pytest.approx(1.0, abs=0.05)


@pytest.mark.long
def test_value_depends_on_the_observation(trained: Any) -> None:
    model = trained(envs.make_observation_value)
    assert value(model, 1.0) == pytest.approx(1.0, abs=0.1)
    assert value(model, -1.0) == pytest.approx(-1.0, abs=0.1)


@pytest.mark.long
def test_value_is_discounted_once_per_step(trained: Any) -> None:
    model = trained(envs.make_two_steps)
    assert value(model, 1.0) == pytest.approx(1.0, abs=0.05)
    assert value(model, 0.0) == pytest.approx(GAMMA, abs=0.05)


@pytest.mark.long
def test_policy_finds_the_better_action(trained: Any) -> None:
    assert probability_of_one(trained(envs.make_action_choice), 0.0) > 0.9


@pytest.mark.long
def test_policy_looks_at_the_observation(trained: Any) -> None:
    model = trained(envs.make_observation_times_action)
    assert probability_of_one(model, 1.0) > 0.9
    assert probability_of_one(model, -1.0) < 0.1


IDENTITY = {
    "A2C": (lambda **kw: A2C(gamma=0.4, learning_rate=0.002, **kw), {"n_envs": 1, "n_steps": 5}),
    "PPO": (
        lambda **kw: PPO(gamma=0.4, learning_rate=0.002, **kw),
        {"n_envs": 1, "n_steps": 128, "batch_size": 64, "n_epochs": 10},
    ),
    "PPO penalty": (
        lambda **kw: PPO(gamma=0.4, learning_rate=0.002, policy_objective="penalty", target_kl=0.1, **kw),
        {"n_envs": 1, "n_steps": 128, "batch_size": 64, "n_epochs": 10},
    ),
    "TRPO": (lambda **kw: TRPO(gamma=0.4, target_kl=0.05, cg_damping=0.01, **kw), {"n_envs": 1, "n_steps": 64}),
}
SPACES = {
    "Discrete": envs.make_identity_discrete,
    "MultiDiscrete": envs.make_identity_multidiscrete,
    "MultiBinary": envs.make_identity_multibinary,
    "Box": envs.make_identity_box,
}


def learns_identity(algorithm: str, make_env: Callable[[], gym.Env], box: bool) -> float:
    make_model, data = IDENTITY[algorithm]
    model = make_model(**({"log_std_init": -0.5} if box else {}))
    fit(model, rollouts(make_env, total_timesteps=2000, seed=3, **data))
    env = make_env()
    observation, _ = env.reset()
    assert np.shape(model.predict(observation)[0]) == np.shape(observation)
    return mean_return(model, env)


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("algorithm", IDENTITY)
def test_every_action_space_is_learned_in_two_thousand_transitions(algorithm: str, space: str) -> None:
    assert learns_identity(algorithm, SPACES[space], space == "Box") >= 90


@pytest.mark.slow
@pytest.mark.bench
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("algorithm", IDENTITY)
def test_identity_environments_of_stable_baselines3(algorithm: str, space: str) -> None:
    identity = pytest.importorskip("stable_baselines3.common.envs.identity_env")
    make_env = {
        "Discrete": lambda: identity.IdentityEnv(4),
        "MultiDiscrete": lambda: identity.IdentityEnvMultiDiscrete(4),
        "MultiBinary": lambda: identity.IdentityEnvMultiBinary(4),
        "Box": lambda: identity.IdentityEnvBox(eps=0.5),
    }[space]
    assert learns_identity(algorithm, make_env, space == "Box") >= 90


@pytest.mark.long
@pytest.mark.parametrize("algorithm", quick(["REINFORCE", "VPG", "A2C", "PPO", "TRPO"], "REINFORCE", "A2C"))
def test_a_time_limit_is_not_an_end(algorithm: str) -> None:
    # Reward 1 for ever is worth 1 / (1 - 0.98) = 50; who takes the limit of 8 for an end finds at most 7.5.
    common = {"gamma": 0.98, "learning_rate": 0.01, "net_arch": [32]}
    model: Any = {
        "REINFORCE": lambda: REINFORCE(psi="baseline", **common),
        "VPG": lambda: REINFORCE(psi="advantage", **common),
        "A2C": lambda: A2C(**common),
        "PPO": lambda: PPO(**common),
        "TRPO": lambda: TRPO(**common, n_critic_updates=20, batch_size=32),
    }[algorithm]()
    data = {"n_envs": 1, "n_steps": 5, "rollouts_per_epoch": 100, "total_timesteps": 2500}
    if algorithm in ("PPO", "TRPO"):
        data = {"n_envs": 2, "n_steps": 64, "total_timesteps": 6400}
        data |= {"n_epochs": 10, "batch_size": 32} if algorithm == "PPO" else {}
    fit(model, rollouts(envs.make_infinite_horizon, **data))
    with torch.no_grad():
        assert model.act(torch.tensor([0]))["value"].item() == pytest.approx(50, abs=1)
