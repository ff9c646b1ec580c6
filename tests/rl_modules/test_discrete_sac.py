"""Discrete SAC against the closed form of maximum-entropy control, and against its equations written out."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import ReplayDataModule
from rl_modules import DiscreteSAC
from rl_modules import functional as F
from tests.training import fit


class Chain(gym.Env):
    """State 0, then state 1, whatever the action; a reward for each action in each state."""

    rewards = np.array([[0.0, 0.5, 1.0], [0.6, 0.0, 0.3]])
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.state = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        reward = float(self.rewards[self.state, action])
        self.state += 1
        return min(self.state, 1), reward, self.state == 2, False, {}


@pytest.mark.long
def test_policy_and_values_become_the_soft_optimal_ones() -> None:
    """Independent source: soft value iteration, π = softmax(Q / α) and V = α log Σ exp(Q / α)."""
    alpha, gamma = 0.4, 0.9
    model = DiscreteSAC(ent_coef=alpha, gamma=gamma, learning_rate=3e-3, tau=0.05, net_arch=[32])
    fit(model, ReplayDataModule(Chain, learning_starts=64, batch_size=64, total_timesteps=1500, eval_freq=0))
    q = Chain.rewards.copy()
    q[0] += gamma * alpha * np.log(np.exp(q[1] / alpha).sum())
    expected = np.exp(q / alpha) / np.exp(q / alpha).sum(1, keepdims=True)
    states = torch.arange(2)
    with torch.no_grad():
        np.testing.assert_allclose(model.policy(states).log_p.exp(), expected, atol=0.03)
        np.testing.assert_allclose(model.q_values(model.network.critics, states).mean(0), q, atol=0.05)
    assert model.predict(np.array([0, 1]), deterministic=True)[0].tolist() == [2, 0]


def test_a_learned_coefficient_holds_the_entropy() -> None:
    model = DiscreteSAC(ent_coef="auto_0.5", target_entropy=0.7, learning_rate=3e-3, net_arch=[32])
    fit(model, ReplayDataModule(Chain, learning_starts=64, batch_size=64, total_timesteps=1500, eval_freq=0))
    entropy = model.policy(torch.arange(2)).entropy().mean().detach()
    assert abs(float(entropy) - 0.7) < 0.1


def test_the_losses_are_the_equations() -> None:
    torch.manual_seed(0)
    model = DiscreteSAC(observation_space=spaces.Box(-1, 1, (4,)), action_space=spaces.Discrete(3), ent_coef=0.3)
    model.configure_model()
    s, alpha = torch.randn(5, 4), 0.3
    batch: Any = {"next_observation": s, "reward": torch.randn(5), "discount": torch.full((5,), 0.9),
                  "terminated": torch.tensor([0, 1, 0, 0, 1]).bool()}  # fmt: skip
    probabilities = torch.softmax(model.network.policy(s), -1)
    q = model.q_values(model.target_network, s)
    target, loss = [], 0.0
    for i in range(5):
        value = sum(
            float(probabilities[i, a]) * (min(q[0, i, a], q[1, i, a]) - alpha * math.log(probabilities[i, a]))
            for a in range(3)
        )
        target.append(batch["reward"][i] + 0.9 * (1 - int(batch["terminated"][i])) * value)
        loss -= value / 5
    torch.testing.assert_close(model.expected_target(batch, alpha), torch.stack(target))
    torch.testing.assert_close(model.actor_loss(q, model.policy(s).log_p, alpha), torch.as_tensor(loss))
    assert model.target_entropy == pytest.approx(0.98 * math.log(3))


def test_the_soft_value_is_largest_for_the_softmax_of_the_values() -> None:
    q = torch.randn(6, 4)
    best = F.soft_value(q, torch.log_softmax(q / 0.7, -1), 0.7)
    torch.testing.assert_close(best, 0.7 * torch.logsumexp(q / 0.7, -1))
    assert (F.soft_value(q, torch.log_softmax(torch.randn(6, 4), -1), 0.7) < best).all()
    with pytest.raises(ValueError, match="log_prob"):
        F.soft_value(q, q[:, 0], 0.7)
