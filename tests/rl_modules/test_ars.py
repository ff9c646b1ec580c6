"""Augmented random search against sb3-contrib's, with the same perturbations, and a table."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import RolloutDataModule
from rl_modules import ARS
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from tests.training import fit, rollouts


class Targets(gym.Env):
    """Three or four steps by the action's sign; the reward is the squared distance of the action from a target."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Box(-0.5, 0.5, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.t = 0
        return self.observation(), {}

    def observation(self) -> np.ndarray:
        return np.cos(np.arange(3, dtype=np.float32) + self.t)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = -float(((action - np.array([0.3, -0.1]) * self.t) ** 2).sum())
        self.t += 1
        return self.observation(), reward, self.t >= 3 + (action[0] > 0), False, {}


class Given(ARS):
    """Draws the perturbations of a stream that sb3-contrib's draws from too."""

    def perturbations(self) -> torch.Tensor:
        size = sum(p.numel() for p in self.network.parameters())
        return torch.normal(mean=0.0, std=1.0, size=(self.n_delta, size))


@pytest.mark.bench
@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "ours"),
    [
        ("LinearPolicy", {}),
        ("MlpPolicy", {"net_arch": [8], "with_bias": True, "squash_output": True, "zero_policy": False}),
    ],
)
def test_the_weights_are_those_of_sb3_contrib(policy: str, ours: dict[str, Any]) -> None:
    sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs the test extra")
    shared = {"n_delta": 5, "n_top": 3, "delta_std": 0.1, "learning_rate": 0.05, "alive_bonus_offset": 0.2,
              "n_eval_episodes": 2}  # fmt: skip
    kwargs = {"policy_kwargs": {"net_arch": [8]}, "zero_policy": False} if policy == "MlpPolicy" else {}
    theirs = sb3_contrib.ARS(policy, Targets(), seed=1, **shared, **kwargs)
    start = theirs.weights.clone()
    torch.manual_seed(7)
    # Seven updates of ten candidates that play two episodes; the last one begins before this number.
    theirs.learn(7 * 20 * 3 - 30)

    class FromTheirs(Given):
        def build_network(self) -> None:
            super().build_network()
            torch.nn.utils.vector_to_parameters(start, self.network.parameters())

    torch.manual_seed(7)
    model = FromTheirs(**shared, **ours)
    fit(model, RolloutDataModule(Targets, n_envs=1, total_timesteps=10**6, eval_freq=0), max_steps=theirs._n_updates)
    assert theirs._n_updates >= 5
    torch.testing.assert_close(
        torch.nn.utils.parameters_to_vector(model.network.parameters()).detach(), theirs.weights, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("n_envs", [1, 3, 16])
def test_the_number_of_environments_changes_no_update(n_envs: int) -> None:
    """Where environments are alike, each candidate's return is the same whoever plays it."""
    models = []
    for n in (2, n_envs):
        model = ARS(n_delta=3, n_top=2, n_eval_episodes=2)
        fit(model, RolloutDataModule(Targets, n_envs=n, total_timesteps=10**6, eval_freq=0), max_steps=4)
        models.append(model.network.layers[0].weight.detach())
    torch.testing.assert_close(*models)
    assert models[0].abs().max() > 0


def test_the_direction_against_a_table() -> None:
    deltas = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    plus, minus = torch.tensor([1.0, 5.0, 0.0]), torch.tensor([2.0, 3.0, -1.0])
    # The best two have the returns 5 | 3 and 1 | 2: Σ (r⁺ - r⁻) δ = 2·(0, 1) - 1·(1, 0).
    scale = 2 * np.std([5, 1, 3, 2], ddof=1)
    expected = torch.tensor([-1.0, 2.0]) / scale
    torch.testing.assert_close(F.random_search_direction(deltas, plus, minus, 2), expected.float())
    equal = F.random_search_direction(deltas, torch.ones(3), torch.ones(3))
    assert torch.equal(equal, torch.zeros(2))
    with pytest.raises(ValueError, match="minus has shape"):
        F.random_search_direction(deltas, plus, minus[:, None])
    with pytest.raises(ValueError, match="n_top=4 must lie in"):
        F.random_search_direction(deltas, plus, minus, 4)


def test_what_it_does_not_do_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="n_top=9 must be at most n_delta=8"):
        ARS(n_top=9)
    with pytest.raises(UsageError, match="n_steps=4: ARS gives"):
        fit(ARS(), rollouts("CartPole-v1", n_envs=2, n_steps=4, total_timesteps=16))
