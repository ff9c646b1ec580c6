"""PQN: its targets by hand and by another route, its values against dynamic programming, masks, resume."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import RolloutDataModule
from rl_modules import PQN
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from tests import envs
from tests.training import assert_resumes_exactly, fit, rollouts

SPACES = {
    "observation_space": space_to_dict(spaces.Box(-1, 1, (3,))),
    "action_space": space_to_dict(spaces.Discrete(4)),
}


def q_lambda_backwards(rollout: dict[str, torch.Tensor], gamma: float, q_lambda: float) -> list[float]:
    """Equation 6 of the paper, from the last transition backwards, for one environment."""
    targets: list[float] = []
    for t in reversed(range(len(rollout["reward"]))):
        following = float(rollout["next_value"][t, 0])  # max_a Q of the true successor
        ended = bool(rollout["terminated"][t, 0] or rollout["truncated"][t, 0])
        if not ended and targets:
            following = q_lambda * targets[-1] + (1 - q_lambda) * following
        target = float(rollout["reward"][t, 0])
        if not rollout["terminated"][t, 0]:
            target += gamma * following
        targets.append(target)
    return targets[::-1]


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_targets_are_those_of_the_paper(q_lambda: float) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(9, 1, generator=generator)
    rollout: Any = {
        "reward": torch.randn(9, 1, generator=generator),
        "value": value,
        "next_value": torch.cat([value[1:], torch.randn(1, 1, generator=generator)]),
        "terminated": torch.zeros(9, 1, dtype=torch.bool),
        "truncated": torch.zeros(9, 1, dtype=torch.bool),
    }
    rollout["terminated"][2] = rollout["truncated"][6] = True
    rollout["next_value"][6] = 3.0  # the value of the final observation, not of the next episode's first
    model = PQN(gamma=0.9, q_lambda=q_lambda, **SPACES)
    expected = q_lambda_backwards(rollout, 0.9, q_lambda)
    torch.testing.assert_close(model.td_target(rollout)[:, 0], torch.tensor(expected))


def test_the_loss_moves_the_action_taken_towards_its_target() -> None:
    model = PQN(**SPACES)
    model.configure_model()
    model._trainer = SimpleNamespace(world_size=1, datamodule=SimpleNamespace(ranks_differ_in_size=False))  # type: ignore[assignment]
    model.run.logs_this_epoch = False
    observation, action = torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    q = model.q_values(observation)
    returns = torch.arange(5.0)
    loss = model.training_step({"observation": observation, "action": action, "returns": returns}, 0)
    torch.testing.assert_close(loss, 0.5 * ((q[torch.arange(5), action] - returns) ** 2).mean())


def test_every_hidden_layer_is_normalised() -> None:
    model = PQN(net_arch=[7, 5], **SPACES)
    model.configure_model()
    kinds = [type(layer).__name__ for layer in model.network.trunk]
    assert kinds == ["Linear", "LayerNorm", "ReLU"] * 2
    features = model.network.trunk[:2](torch.randn(6, 3) * 100)
    torch.testing.assert_close(features.mean(1), torch.zeros(6), atol=1e-5, rtol=0)


def test_values_of_the_policy_are_the_best_actions() -> None:
    model = PQN(exploration_initial_eps=1.0, **SPACES)
    model.configure_model()
    observation = torch.randn(200, 3)
    acted = model.act(observation, torch.Generator().manual_seed(0))
    q = model.q_values(observation)
    torch.testing.assert_close(acted["value"], q.max(1).values)
    assert torch.bincount(acted["action"], minlength=4).min() > 30  # uniform at ε = 1
    assert torch.equal(model.act(observation, deterministic=True)["action"], q.argmax(1))


@pytest.mark.long
def test_learns_the_better_action() -> None:
    model = PQN(gamma=0.5, learning_rate=0.005, net_arch=[32], exploration_final_eps=0.2)
    data = RolloutDataModule(envs.make_observation_times_action, n_envs=4, n_steps=16, batch_size=32, n_epochs=4,
                             total_timesteps=3000, eval_freq=0)  # fmt: skip
    fit(model, data)
    for observation, best in ((1.0, 1), (-1.0, 0)):
        assert int(model.predict(np.array([observation], np.float32), deterministic=True)[0]) == best
        q = model.q_values(torch.tensor([[observation]]))
        assert q[0, best].item() == pytest.approx(1.0, abs=0.2)


def test_a_masked_action_is_neither_taken_nor_valued() -> None:
    seen = []

    class Keeps(PQN):
        def prepare(self, rollout: Any) -> dict[str, Any]:
            seen.append(rollout)
            return super().prepare(rollout)

    fit(Keeps(net_arch=[16]), rollouts("datamodules.envs.invalid_actions:InvalidActions", 2, 32, total_timesteps=256))
    for rollout in seen:
        mask = rollout["observation"]["action_mask"]
        assert not mask.all() and mask.gather(-1, rollout["action"][..., None]).all()
        assert (rollout["value"] > -1e6).all()
    assert len(seen) == 4


@pytest.mark.long
def test_resumes_exactly(tmp_path: Any) -> None:
    assert_resumes_exactly(
        lambda: PQN(net_arch=[16], learning_rate="lin_1e-3"),
        lambda: RolloutDataModule("CartPole-v1", n_envs=2, n_steps=32, batch_size=16, n_epochs=2, eval_freq=0,
                                  total_timesteps=10**6),
        tmp_path, epochs=3,
    )  # fmt: skip


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match=r"q_lambda=1.5 must lie in \[0, 1\]"):
        PQN(q_lambda=1.5)
    with pytest.raises(UsageError, match="PQN compares the values of all actions"):
        fit(PQN(), RolloutDataModule("Pendulum-v1", n_envs=1, n_steps=8, batch_size=8, total_timesteps=8))
