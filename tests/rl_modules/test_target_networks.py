"""Target networks compute targets in evaluation mode, and running statistics are copied to them."""

import warnings
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from datamodules import ReplayDataModule
from rl_modules import C51, DDPG, DQN, QRDQN, SAC, TD3, TQC
from tests.training import fit

ALGORITHMS = [DQN, C51, QRDQN, SAC, TQC, TD3, DDPG]


class Normalized(nn.Module):
    """Features with dropout and running statistics."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.features_dim = 8
        self.layers = nn.Sequential(nn.Linear(space.shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(algorithm: Any, **arguments: Any) -> ReplayDataModule:
    env = "CartPole-v1" if issubclass(algorithm, DQN) else "Pendulum-v1"
    wrappers = [{"class_path": "TimeLimit", "init_args": {"max_episode_steps": 5}}]
    sizes = {"learning_starts": 20, "total_timesteps": 60, "batch_size": 8, "n_eval_episodes": 1, "wrappers": wrappers}
    return ReplayDataModule(env, **{**sizes, "eval_freq": 15, "rollouts_per_epoch": 1, **arguments})


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_targets_are_the_same_when_computed_twice(algorithm: Any) -> None:
    """Evaluations between, after which Lightning restores the modes, change nothing."""
    seen: list[tuple[bool, bool]] = []

    class Watched(algorithm):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            observation = batch["observation"]
            if isinstance(self, DQN):
                twice = [self.target_values(observation) for _ in range(2)]
            else:
                critics = getattr(self.target_network, "critics", self.target_network)
                twice = [critics(observation, batch["action"]) for _ in range(2)]
            others = any(part.training for part in self.target_network.modules())
            seen.append((torch.equal(*twice), others or not self.network.training))
            return super().training_step(batch, batch_idx)

    model = Watched(net_arch=[8], features_extractor=Normalized)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*in eval mode.*")
        for _ in range(2):
            fit(model, data(algorithm))
    assert len(seen) >= 20 and set(seen) == {(True, False)}


@pytest.mark.parametrize("algorithm", [DQN, C51, QRDQN])
def test_running_statistics_are_copied_with_the_weights(algorithm: Any) -> None:
    model = algorithm(net_arch=[8], features_extractor=Normalized, target_update_interval=10)
    fit(model, data(algorithm))
    # Between two updates of the target the network learns on: what was copied last is older than what is there.
    model.source.num_timesteps = 100
    model.update_target()
    own, target = dict(model.network.named_buffers()), dict(model.target_network.named_buffers())
    assert own.keys() == target.keys() and any("running_mean" in name for name in own)
    for name, x in own.items():
        assert torch.equal(x, target[name]), name


def test_the_targets_are_those_of_the_running_statistics() -> None:
    """Worked by hand: r + γ max Q_target(s') with the batch normalisation's running mean and variance."""
    found: list[tuple[Tensor, Tensor]] = []

    class Watched(DQN):
        def prepare(self, sample: Any) -> dict[str, Any]:
            prepared = super().prepare(sample)
            target = self.target_network
            linear, norm = target.encoder.extractor.layers[:2]
            x = sample["next_observation"] @ linear.weight.T + linear.bias
            x = (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
            q = target.head(target.trunk(x.relu())).amax(1)
            found.append((prepared["target"], sample["reward"][:, 0] + 0.9 * q * ~sample["terminated"]))
            return prepared

    fit(Watched(gamma=0.9, net_arch=[8], features_extractor=Normalized, target_update_interval=10), data(DQN))
    assert len(found) == 10
    for ours, expected in found:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_begins_with_a_target_network_equal_to_its_network(algorithm: Any) -> None:
    """Before a run a loop of the user's, or another fit, has trained the network and not its target."""
    found: list[bool] = []

    class Watched(algorithm):
        def prepare(self, sample: Any) -> dict[str, Any]:
            if not found:
                followed = self.network.critics if algorithm in (SAC, TQC) else self.network
                own, target = followed.state_dict(), self.target_network.state_dict()
                found.append(
                    own.keys() == target.keys() and all(torch.equal(x, target[name]) for name, x in own.items())
                )
            return super().prepare(sample)

    settings = {"target_update_interval": 10_000} if issubclass(algorithm, DQN) else {"tau": 1e-6}
    model = Watched(net_arch=[8], features_extractor=Normalized, **settings)
    fit(model, data(algorithm))
    assert found == [True]
    with torch.no_grad():
        for x in model.network.parameters():
            x.add_(0.1)
    found.clear()
    fit(model, data(algorithm))
    assert found == [True]
