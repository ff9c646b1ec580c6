"""QR-DQN: its target and loss by hand and against sb3-contrib, its tasks with known answers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import ReplayDataModule
from rl_modules import QRDQN
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.networks.q_network import DistributionalQNetwork
from tests import envs
from tests.training import assert_resumes_exactly, fit

STATES = {
    "observation_space": space_to_dict(spaces.Discrete(3)),
    "action_space": space_to_dict(spaces.Discrete(2)),
}


class Table(torch.nn.Module):
    """Two quantiles of two actions, looked up by state."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values))

    def forward(self, observation: Any) -> Any:
        return self.values[observation]


def tabular(online: Any, target: Any, cls: type[QRDQN] = QRDQN, **arguments: Any) -> QRDQN:
    model = cls(n_quantiles=2, **STATES, **arguments)
    model.configure_model()
    model.network, model.target_network = Table(online), Table(target).requires_grad_(False)  # type: ignore[assignment]
    model._trainer = SimpleNamespace(datamodule=SimpleNamespace(num_timesteps=0))  # type: ignore[assignment]
    model.run.logs_this_epoch = False
    return model


#: [state, quantile, action].
ONLINE = [[[0.0, 1.0], [2.0, 5.0]], [[9.0, 0.0], [9.0, 0.0]], [[0.0, 4.0], [0.0, 4.0]]]
TARGET = [[[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 8.0]], [[10.0, 20.0], [30.0, 30.0]]]
SAMPLE = {
    "observation": torch.tensor([0, 0]),
    "action": torch.tensor([1, 0]),
    "reward": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "n_steps": torch.tensor([2, 2]),
    "terminated": torch.tensor([False, True]),
    "next_observation": torch.tensor([1, 2]),
}


@pytest.mark.parametrize(("double", "following"), [
    (False, [2.0, 8.0]),  # action 1 has the larger mean under the target network
    (True, [1.0, 3.0]),  # action 0 under the network
])  # fmt: skip
def test_hand_worked_target_over_two_steps(double: bool, following: list[float]) -> None:
    model = tabular(ONLINE, TARGET, gamma=0.5, double=double)
    target = model.td_target(model.prepare(SAMPLE))
    assert target.tolist() == [[2 + 0.25 * x for x in following], [5.0, 5.0]]


class RiskAverse(QRDQN):
    """Judges an action by its worst quantile."""

    def mean_return(self, quantiles: torch.Tensor) -> torch.Tensor:
        return quantiles.amin(1)


@pytest.mark.parametrize("double", [False, True])
def test_targets_and_actions_are_chosen_by_a_subclass_s_statistic(double: bool) -> None:
    gamble = [ONLINE[0], [[1.0, 0.0], [3.0, 8.0]], ONLINE[2]]  # action 1 of state 1: the larger mean, the smaller worst
    for cls, action, following in ((QRDQN, 1, [0.0, 8.0]), (RiskAverse, 0, [1.0, 3.0])):
        model = tabular(gamble, gamble, cls, gamma=0.5, double=double)
        assert model.act(torch.tensor([1]), deterministic=True)["action"].tolist() == [action]
        assert model.td_target(model.prepare(SAMPLE))[0].tolist() == [2 + 0.25 * x for x in following]


def test_loss_is_that_of_sb3_contrib_and_moves_the_action_taken() -> None:
    theirs = pytest.importorskip("sb3_contrib.common.utils").quantile_huber_loss
    model = tabular(ONLINE, TARGET, gamma=0.5)
    loss = model.training_step(model.prepare(SAMPLE), 0)
    current = torch.tensor([[1.0, 5.0], [0.0, 2.0]])
    target = torch.tensor([[2.5, 4.0], [5.0, 5.0]])
    torch.testing.assert_close(loss, theirs(current, target, sum_over_quantiles=True))
    loss.backward()
    gradient = model.network.values.grad
    assert (gradient[1:] == 0).all() and (gradient[0] != 0).any()


def test_prioritised_replay_gets_the_errors_of_the_means_and_its_weights_scale_the_loss() -> None:
    model = tabular(ONLINE, TARGET, gamma=0.5)
    sample = {**SAMPLE, "weight": torch.tensor([1.0, 1.0]), "index": torch.arange(2)}
    plain = model.training_step(model.prepare(sample), 0)
    assert model.td_error.tolist() == [pytest.approx(3.25 - 3.0), 4.0]
    halved = model.training_step(model.prepare({**sample, "weight": torch.tensor([0.5, 0.5])}), 0)
    torch.testing.assert_close(halved, plain / 2)


def test_dueling_quantiles_have_the_mean_advantage_taken_off() -> None:
    network = DistributionalQNetwork(spaces.Box(-1, 1, (3,)), 4, 5, [8], dueling=True)
    observation = torch.randn(6, 3)
    z = network(observation)
    assert z.shape == (6, 5, 4)
    value = network.value_head(network.streams(network.trunk(network.encoder(observation)))[0])
    torch.testing.assert_close(z.mean(2), value)


def test_same_weights_give_sb3_contribs_quantiles() -> None:
    peer = pytest.importorskip("sb3_contrib").QRDQN("MlpPolicy", "CartPole-v1", seed=0, device="cpu",
                                                    policy_kwargs={"n_quantiles": 7, "net_arch": [16]})  # fmt: skip
    ours = DistributionalQNetwork(spaces.Box(-1, 1, (4,)), 2, 7, [16])
    with torch.no_grad():
        for mine, its in zip(ours.parameters(), peer.quantile_net.parameters(), strict=True):
            mine.copy_(its)
    observation = torch.randn(5, 4)
    torch.testing.assert_close(ours(observation), peer.quantile_net(observation))
    defaults = QRDQN(observation_space=space_to_dict(spaces.Box(-1, 1, (4,))), action_space=STATES["action_space"])
    assert defaults.n_quantiles == 200 and defaults.exploration_fraction == peer.exploration_fraction
    assert defaults.exploration_final_eps == peer.exploration_final_eps
    assert defaults.target_update_interval == peer.target_update_interval
    assert defaults.max_grad_norm == peer.max_grad_norm
    settings = peer.policy.optimizer.param_groups[0]
    defaults._trainer = SimpleNamespace(datamodule=SimpleNamespace(batch_size=32), precision="32-true")  # type: ignore[assignment]
    defaults.network = DistributionalQNetwork(spaces.Box(-1, 1, (4,)), 2, 200)
    mine = defaults.configure_optimizers().param_groups[0]
    assert (mine["lr"], mine["eps"]) == (settings["lr"], settings["eps"])


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [pytest.param({}, marks=pytest.mark.slow), {"double": True, "dueling": True}],
    ids=["plain", "double dueling"],
)
def test_learns_the_better_action(arguments: dict[str, Any]) -> None:
    model = QRDQN(n_quantiles=8, gamma=0.5, learning_rate=0.005, target_update_interval=20, exploration_fraction=0.3,
                  net_arch=[32], **arguments)  # fmt: skip
    data = ReplayDataModule(envs.make_observation_times_action, n_envs=4, buffer_size=2000, learning_starts=100,
                            total_timesteps=3000, eval_freq=0, batch_size=32, gradient_steps=4)  # fmt: skip
    fit(model, data)
    for observation, best in ((1.0, 1), (-1.0, 0)):
        assert int(model.predict(np.array([observation], np.float32), deterministic=True)[0]) == best
        q = model.q_values(model.network, torch.tensor([[observation]]))
        assert q[0, best].item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.long
def test_quantiles_are_those_of_the_return() -> None:
    """Rewards ±1 with equal chances: where the loss is smallest, θ_i = ±(1 - τ/(1 - τ)) by hand (κ = 1)."""
    model = QRDQN(n_quantiles=4, gamma=0.0, learning_rate=0.01, target_update_interval=20, net_arch=[16])
    data = ReplayDataModule(envs.make_coin, buffer_size=2000, learning_starts=500, total_timesteps=3000, eval_freq=0,
                            batch_size=64)  # fmt: skip
    fit(model, data)
    quantiles = model.network(torch.zeros(1, 1))[0].detach().mean(1).sort().values
    torch.testing.assert_close(quantiles, torch.tensor([1 / 7 - 1, 3 / 5 - 1, 1 - 3 / 5, 1 - 1 / 7]), atol=0.1, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("prioritized", [False, True])
def test_resumes_exactly(prioritized: bool, tmp_path: Any) -> None:
    assert_resumes_exactly(
        lambda: QRDQN(n_quantiles=5, target_update_interval=20, double=True, dueling=True),
        lambda: ReplayDataModule("CartPole-v1", n_envs=2, buffer_size=500, learning_starts=32, batch_size=8, n_steps=3,
                                 prioritized_replay=prioritized, rollouts_per_epoch=3, eval_freq=0,
                                 total_timesteps=10**6),
        tmp_path, epochs=3,
    )  # fmt: skip


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="n_quantiles=0 must be at least 1"):
        QRDQN(n_quantiles=0)
    with pytest.raises(UsageError, match="QRDQN compares the values of all actions"):
        fit(QRDQN(), ReplayDataModule("Pendulum-v1", learning_starts=10, buffer_size=100, total_timesteps=100))
