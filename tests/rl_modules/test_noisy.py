"""Noisy networks: the noise's distribution, what it is drawn from, when it is there, resuming."""

import copy
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rl_modules import C51, DQN, QRDQN
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.networks.layers import ParallelLinear
from rl_modules.networks.q_network import NoisyLinear, QNetwork, make_noisy, remove_noise, resample
from tests.conformance.control import CASES
from tests.training import assert_resumes_exactly, fit

CARTPOLE = gym.make("CartPole-v1")
SPACES = {"observation_space": space_to_dict(CARTPOLE.observation_space),
          "action_space": space_to_dict(CARTPOLE.action_space)}  # fmt: skip
CASE = {case.name: case for case in CASES if not case.label}


@pytest.mark.long
def test_the_noise_is_factorised_and_has_the_papers_moments():
    layer, generator = NoisyLinear(nn.Linear(3, 4)), torch.Generator().manual_seed(0)
    weights, biases = [], []
    for _ in range(20_000):
        layer.resample(generator)
        weights.append(layer._noise[0])
        biases.append(layer._noise[1])
    weights, biases = torch.stack(weights), torch.stack(biases)
    # An outer product has rank 1: every 2x2 determinant is 0.
    torch.testing.assert_close(
        weights[:, 0, 0] * weights[:, 1, 1], weights[:, 0, 1] * weights[:, 1, 0], atol=1e-5, rtol=1e-4
    )
    # E f(x)² = E|x| = √(2/π) of each factor; the bias has one of them.
    assert weights.mean().abs() < 0.01
    torch.testing.assert_close(weights.var(0), torch.full((4, 3), 2 / math.pi), rtol=0.1, atol=0)
    torch.testing.assert_close(biases.var(0), torch.full((4,), math.sqrt(2 / math.pi)), rtol=0.05, atol=0)


@pytest.mark.parametrize("plain", [nn.Linear(5, 3), ParallelLinear(2, 5, 3)])
def test_without_noise_the_layer_is_the_linear_one(plain):
    layer = NoisyLinear(plain)
    with torch.no_grad():
        plain.weight.copy_(layer.weight_mean)
        plain.bias.copy_(layer.bias_mean)
    x = torch.randn(*(() if isinstance(plain, nn.Linear) else (2,)), 7, 5)
    torch.testing.assert_close(layer(x), plain(x))
    assert float(layer.weight_sigma[..., 0, 0].mean().detach()) == pytest.approx(0.5 / math.sqrt(5))
    assert layer.weight_mean.abs().max() <= 1 / math.sqrt(5)
    layer.resample(torch.Generator().manual_seed(0))
    noisy = layer(x)
    with torch.no_grad():
        plain.weight.add_(layer.weight_sigma * layer._noise[0])
        plain.bias.add_(layer.bias_sigma * layer._noise[1])
    torch.testing.assert_close(noisy, plain(x))
    noisy.sum().backward()
    torch.testing.assert_close(layer.weight_sigma.grad, layer.weight_mean.grad * layer._noise[0])
    layer.remove_noise()
    assert layer._noise is None


@pytest.mark.parametrize("dueling", [False, True])
def test_every_layer_but_the_encoder_is_noisy(dueling):
    network = make_noisy(QNetwork(CARTPOLE.observation_space, 2, [8, 8], dueling=dueling))
    parts = list(network.modules())
    assert not [part for part in parts if isinstance(part, nn.Linear | ParallelLinear)]
    assert len([part for part in parts if isinstance(part, NoisyLinear)]) == (4 if dueling else 3)
    observation = torch.randn(5, 4)
    still = network(observation)
    resample(network, torch.Generator().manual_seed(0))
    assert not torch.equal(network(observation), still)
    # Another generator of the same seed draws the same.
    other = copy.deepcopy(network)
    resample(other, torch.Generator().manual_seed(0))
    torch.testing.assert_close(other(observation), network(observation))
    remove_noise(network)
    assert torch.equal(network(observation), still)


@pytest.mark.parametrize("cls", [DQN, QRDQN, C51])
def test_acting_is_noisy_and_evaluating_is_not(cls):
    model = cls(noisy=True, exploration_initial_eps=0.0, **SPACES)
    model.configure_model()
    observation, generator = torch.randn(200, 4) / 10, torch.Generator().manual_seed(0)
    sampled = torch.stack([model.act(observation, generator)["action"] for _ in range(20)])
    assert (sampled != sampled[0]).any()
    greedy = [model.act(observation, generator, deterministic=True)["action"] for _ in range(5)]
    assert all(torch.equal(action, greedy[0]) for action in greedy)


@pytest.mark.parametrize("cls", [DQN, QRDQN, C51])
def test_the_targets_of_each_minibatch_have_noise_of_their_own(cls):
    """A round of three minibatches is prepared at once."""
    model = cls(noisy=True, double=True, **SPACES)
    model.configure_model()
    model._trainer = SimpleNamespace(datamodule=SimpleNamespace(num_timesteps=0, batch_size=2, seed=0))
    rows = torch.randn(1, 4).expand(6, 4)
    sample = {"observation": rows, "next_observation": rows, "action": torch.zeros(6, dtype=torch.int64),
              "reward": torch.zeros(6, 1), "n_steps": torch.ones(6), "terminated": torch.zeros(6).bool()}  # fmt: skip
    with torch.no_grad():
        first, second, third = model.prepare(sample)["next_q"].split(2)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.long
@pytest.mark.parametrize("name", ["DQN", "QRDQN", "C51"])
def test_a_run_learns_its_noise_and_resumes_exactly(name, tmp_path):
    case = CASE[name]
    assert_resumes_exactly(lambda: case.make_model(noisy=True, double=True), case.make_epochs, tmp_path, epochs=3)
    model = case.make_model(noisy=True)
    fit(model, case.make_data())
    sigma = model.network.head.weight_sigma
    assert sigma.std() > 0
    assert model.network.head._noise is None
    fit(model, case.make_data())


@pytest.mark.long
def test_a_checkpoint_loads_alone(tmp_path):
    model = CASE["DQN"].make_model(noisy=True)
    fit(model, CASE["DQN"].make_data()).save_checkpoint(tmp_path / "a.ckpt")
    loaded = DQN.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    observation = CARTPOLE.reset(seed=0)[0]
    np.testing.assert_array_equal(
        model.predict(observation, deterministic=True)[0], loaded.predict(observation, deterministic=True)[0]
    )


def test_a_network_of_the_users_is_refused():
    with pytest.raises(UsageError, match="noisy=True changes the project's own network"):
        DQN(noisy=True, network="tests.networks.ActionValues", **SPACES).configure_model()


@pytest.mark.slow
def test_noise_alone_learns_cartpole():
    """Random actions give 22; 144 was measured."""
    from datamodules import ReplayDataModule

    settings = {"learning_starts": 1000, "train_freq": 256, "gradient_steps": 128, "batch_size": 64,
                "buffer_size": 100_000, "total_timesteps": 50_000, "eval_freq": 0, "n_test_episodes": 50}  # fmt: skip
    model = DQN(noisy=True, exploration_initial_eps=0.0, exploration_final_eps=0.0, learning_rate=2.3e-3,
                target_update_interval=10, net_arch=[256, 256])  # fmt: skip
    data = ReplayDataModule("CartPole-v1", **settings)
    trainer = fit(model, data)
    assert trainer.test(model, datamodule=data, verbose=False)[0]["test/mean_reward"] > 90
