"""C51: its target and loss by hand, its distributions against known ones, masks, Rainbow, resume."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from datamodules import ReplayDataModule
from rl_modules import C51
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from tests import envs
from tests.training import assert_resumes_exactly, fit

STATES = {
    "observation_space": space_to_dict(spaces.Discrete(3)),
    "action_space": space_to_dict(spaces.Discrete(2)),
}
RAINBOW = {"double": True, "dueling": True, "noisy": True, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}


class Table(torch.nn.Module):
    """Logits of three returns of two actions, looked up by state."""

    def __init__(self, probabilities: Any) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).clamp_min(1e-30).log())

    def forward(self, observation: Any) -> Any:
        return self.logits[observation]


def tabular(online: Any, target: Any, **arguments: Any) -> C51:
    """With returns 0, 2 and 4."""
    model = C51(n_atoms=3, v_min=0.0, v_max=4.0, **STATES, **arguments)
    model.configure_model()
    model.network, model.target_network = Table(online), Table(target).requires_grad_(False)  # type: ignore[assignment]
    model._trainer = SimpleNamespace(datamodule=SimpleNamespace(num_timesteps=0))  # type: ignore[assignment]
    model.run.logs_this_epoch = False
    return model


#: [state, return, action].
ONLINE = [
    [[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]],
    [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]],
    [[1.0, 1.0], [0.0] * 2, [0.0] * 2],
]
TARGET = [
    [[1.0, 1.0], [0.0] * 2, [0.0] * 2],
    [[1.0, 0.0], [0.0, 0.5], [0.0, 0.5]],
    [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]],
]
SAMPLE = {
    "observation": torch.tensor([0, 0]),
    "action": torch.tensor([1, 0]),
    "reward": torch.tensor([[0.0, 2.0], [0.5, 0.0]]),
    "n_steps": torch.tensor([2, 2]),
    "terminated": torch.tensor([False, True]),
    "next_observation": torch.tensor([1, 2]),
}


@pytest.mark.parametrize(("double", "expected"), [
    # Action 1 of the target network: 1 + ¼ · 2 and 1 + ¼ · 4, half each: 1.5 lies ¾ of the way to 2, 2 is a point.
    (False, [0.125, 0.875, 0.0]),
    # Action 0, which the network prefers: 1 + ¼ · 0, half way between 0 and 2.
    (True, [0.5, 0.5, 0.0]),
])  # fmt: skip
def test_hand_worked_target_over_two_steps(double: bool, expected: list[float]) -> None:
    model = tabular(ONLINE, TARGET, gamma=0.5, double=double)
    target = model.td_target(model.prepare(SAMPLE))
    torch.testing.assert_close(target, torch.tensor([expected, [0.75, 0.25, 0.0]]))


def test_loss_is_the_cross_entropy_and_moves_the_action_taken() -> None:
    model = tabular(ONLINE, TARGET, gamma=0.5)
    loss = model.training_step(model.prepare(SAMPLE), 0)
    by_hand = [0.125 * math.log(4) + 0.875 * math.log(4), 0.75 * math.log(2) + 0.25 * math.log(4)]
    assert loss.item() == pytest.approx(sum(by_hand) / 2)
    loss.backward()
    gradient = model.network.logits.grad
    # softmax minus target, over two rows
    torch.testing.assert_close(gradient[0, :, 1], torch.tensor([0.25 - 0.125, 0.25 - 0.875, 0.5]) / 2)
    assert (gradient[1:] == 0).all()


def test_prioritised_replay_gets_the_divergence_and_its_weights_scale_the_loss() -> None:
    model = tabular(ONLINE, TARGET, gamma=0.5)
    sample = {**SAMPLE, "weight": torch.tensor([1.0, 1.0]), "index": torch.arange(2)}
    plain = model.training_step(model.prepare(sample), 0)
    first = 0.125 * math.log(0.125 / 0.25) + 0.875 * math.log(0.875 / 0.25)
    second = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.25)
    assert model.td_error.tolist() == pytest.approx([first, second])
    halved = model.training_step(model.prepare({**sample, "weight": torch.tensor([0.5, 0.5])}), 0)
    torch.testing.assert_close(halved, plain / 2)


@pytest.mark.parametrize("double", [False, True])
def test_the_target_takes_no_masked_action(double: bool) -> None:
    model = tabular(ONLINE, TARGET, gamma=0.5, double=double)
    mask = torch.tensor([[double, not double], [True, True]])  # not the action that it would take
    sample = {**SAMPLE, "observation": {"observation": SAMPLE["observation"], "action_mask": torch.ones(2, 2).bool()},
              "next_observation": {"observation": SAMPLE["next_observation"], "action_mask": ~mask}}  # fmt: skip
    target = model.td_target(model.prepare(sample))
    expected = [0.125, 0.875, 0.0] if double else [0.5, 0.5, 0.0]
    torch.testing.assert_close(target[0], torch.tensor(expected))


def test_values_are_compared_in_float32_under_autocast() -> None:
    """In bfloat16 9.4 and 9.42 are one number, and the first action would always win."""
    model = C51(n_atoms=2, v_min=0.0, v_max=10.0, **STATES)
    model.configure_model()
    model.network = Table([[[0.06, 0.058], [0.94, 0.942]]] * 3)  # type: ignore[assignment]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q = model.q_values(model.network, torch.tensor([0, 1]))
    torch.testing.assert_close(q, torch.tensor([[9.4, 9.42]] * 2))
    assert q.argmax(1).tolist() == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{}, pytest.param(RAINBOW, marks=pytest.mark.slow)], ids=["plain", "rainbow"])
def test_learns_the_better_action(arguments: dict[str, Any]) -> None:
    model = C51(n_atoms=21, v_min=-2.0, v_max=2.0, gamma=0.5, learning_rate=0.005, target_update_interval=20,
                net_arch=[32], **{"exploration_fraction": 0.3, **arguments})  # fmt: skip
    data = ReplayDataModule(envs.make_observation_times_action, n_envs=4, buffer_size=2000, learning_starts=100,
                            total_timesteps=3000, eval_freq=0, batch_size=32, gradient_steps=4,
                            prioritized_replay=bool(arguments))  # fmt: skip
    fit(model, data)
    for observation, best in ((1.0, 1), (-1.0, 0)):
        assert int(model.predict(np.array([observation], np.float32), deterministic=True)[0]) == best
        q = model.q_values(model.network, torch.tensor([[observation]]))
        assert q[0, best].item() == pytest.approx(1.0, abs=0.2)


@pytest.mark.long
def test_probabilities_are_those_of_the_return() -> None:
    """Rewards ±1 with equal chances."""
    model = C51(n_atoms=5, v_min=-1.0, v_max=1.0, gamma=0.0, learning_rate=0.01, target_update_interval=20,
                net_arch=[16])  # fmt: skip
    data = ReplayDataModule(envs.make_coin, buffer_size=2000, learning_starts=500, total_timesteps=3000, eval_freq=0,
                            batch_size=64)  # fmt: skip
    fit(model, data)
    probability = model.log_probs(model.network, torch.zeros(1, 1))[0].detach().exp().mean(1)
    torch.testing.assert_close(probability, torch.tensor([0.5, 0.0, 0.0, 0.0, 0.5]), atol=0.05, rtol=0)


@pytest.mark.parametrize("rainbow", [False, True])
def test_resumes_exactly(rainbow: bool, tmp_path: Any) -> None:
    assert_resumes_exactly(
        lambda: C51(n_atoms=7, v_min=0.0, v_max=50.0, target_update_interval=20, **(RAINBOW if rainbow else {})),
        lambda: ReplayDataModule("CartPole-v1", n_envs=2, buffer_size=500, learning_starts=32, batch_size=8,
                                 n_steps=3 if rainbow else 1, prioritized_replay=rainbow, rollouts_per_epoch=3,
                                 eval_freq=0, total_timesteps=10**6),
        tmp_path, epochs=3,
    )  # fmt: skip


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="n_atoms=1 must be at least 2"):
        C51(n_atoms=1)
    with pytest.raises(UsageError, match=r"v_max=1.0 must be above v_min=2.0"):
        C51(v_min=2.0, v_max=1.0)
    with pytest.raises(UsageError, match="C51 compares the values of all actions"):
        fit(C51(), ReplayDataModule("Pendulum-v1", learning_starts=10, buffer_size=100, total_timesteps=100))
