from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_modules import A2C, REINFORCE
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import space_to_dict
from rl_modules.reinforce import PSI, at_first_transition
from tests import envs
from tests.training import assert_resumes_exactly, fit, rollouts

SPACES = {
    "observation_space": space_to_dict(spaces.Box(-1, 1, (2,), np.float32)),
    "action_space": space_to_dict(spaces.Discrete(2)),
}


def column(*values: Any) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def rollout(**changes: Any) -> dict[str, torch.Tensor]:
    """One environment; an episode that terminates (rewards 1, 2), one truncated (4), one cut by the rollout (8, 16)."""
    fields = {
        "observation": torch.zeros(5, 1, 2),
        "action": torch.zeros(5, 1, dtype=torch.long),
        "reward": column(1.0, 2.0, 4.0, 8.0, 16.0),
        "terminated": column(False, True, False, False, False),
        "truncated": column(False, False, True, False, False),
        "valid": column(True, True, True, True, True),
        "value": column(10.0, 20.0, 30.0, 40.0, 50.0),
        "next_value": column(20.0, 99.0, 60.0, 50.0, 70.0),
    }
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("psi", "expected"),
    [
        # Without a critic an episode is worth what it earned in the rollout.
        ("return", [2.0, 2.0, 4.0, 16.0, 16.0]),
        ("reward_to_go", [2.0, 2.0, 4.0, 16.0, 16.0]),
        # With one, V stands for the rest at the truncation (60) and at the cut (70), not at the end (99).
        ("baseline", [2.0 - 10, 2.0 - 20, 34.0 - 30, 8 + 0.5 * 51 - 40, 51.0 - 50]),
        # λ = 1/2: δ = 1, -18, 4, -7, 1.
        ("advantage", [1 - 18 / 4, -18.0, 4.0, -7 + 1 / 4, 1.0]),
    ],
)
def test_weights_by_hand(psi: str, expected: list[float]) -> None:
    model = REINFORCE(psi=psi, gamma=0.5, gae_lambda=0.5, **SPACES)
    assert model.weights(rollout()).squeeze(1).tolist() == pytest.approx(expected)


def test_whole_return_counts_the_past_and_reward_to_go_does_not() -> None:
    fields = rollout(reward=column(4.0, 2.0, 1.0, 0.0, 1.0))
    whole = REINFORCE(psi="return", gamma=1.0, **SPACES).weights(fields).squeeze(1).tolist()
    to_go = REINFORCE(psi="reward_to_go", gamma=1.0, **SPACES).weights(fields).squeeze(1).tolist()
    assert whole == [6.0, 6.0, 1.0, 1.0, 1.0]
    assert to_go == [6.0, 2.0, 1.0, 1.0, 1.0]


def test_rows_that_only_reset_start_no_episode() -> None:
    x = column(1.0, 2.0, 3.0, 4.0, 5.0)
    ended = column(False, True, False, False, False)
    valid = column(True, True, False, True, True)
    result = at_first_transition(x, ended, valid).squeeze(1)
    assert result[valid.squeeze(1)].tolist() == [1.0, 1.0, 4.0, 4.0]


def play(model: REINFORCE, actions: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The trajectory of these actions in a task whose rewards and observations depend on all actions so far."""
    states, rewards, past = [], [], 0.0
    for t, action in enumerate(actions):
        states.append([float(t), past])
        rewards.append((1.0, -2.0)[action] * (t + 1) + past)
        past = past * 0.5 + action
    observation = torch.tensor(states).unsqueeze(1)
    with torch.no_grad():
        value = model.network(observation.flatten(0, 1))[1].reshape(-1, 1)
    n = len(actions)
    return {
        "observation": observation,
        "action": column(*actions),
        "reward": column(*rewards),
        "terminated": column(*[t == n - 1 for t in range(n)]),
        "truncated": column(*[False] * n),
        "valid": column(*[True] * n),
        "value": value,
        "next_value": torch.cat([value[1:], value[:1]]),
    }


@pytest.mark.parametrize("psi", PSI)
def test_expected_gradient_is_that_of_the_expected_return(psi: str) -> None:
    # Three actions of two kinds: all eight trajectories, each with its probability. λ = 1 keeps GAE unbiased.
    model = REINFORCE(psi=psi, gamma=1.0, gae_lambda=1.0, net_arch=[4], ortho_init=False, **SPACES)
    model.configure_model()
    parameters = [p for name, p in model.network.named_parameters() if "value" not in name]
    expected_return = torch.zeros(())
    estimate = [torch.zeros_like(p) for p in parameters]
    for actions in product((0, 1), repeat=3):
        trajectory = play(model, actions)
        batch = {k: v.flatten(0, 1) for k, v in model.prepare(trajectory).items()}
        log_prob = model.network(batch["observation"])[0].log_prob(batch["action"])
        probability = log_prob.sum().exp()
        expected_return = expected_return + probability * trajectory["reward"].sum()
        gradients = torch.autograd.grad(model.policy_loss(log_prob, batch), parameters, retain_graph=True)
        for total, gradient in zip(estimate, gradients, strict=True):
            # The loss is a mean over the trajectory's three transitions, the gradient of the return a sum.
            total -= 3 * probability.detach() * gradient
    exact = torch.autograd.grad(expected_return, parameters)
    for ours, theirs in zip(estimate, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # sums of eight float32 gradients


def test_only_what_needs_a_critic_has_one() -> None:
    for psi in PSI:
        model = REINFORCE(psi=psi, **SPACES)
        model.configure_model()
        has_critic = psi in ("baseline", "advantage")
        assert (model.network.value_head is not None) == has_critic
        assert ("value" in model.act(torch.zeros(3, 2))) == has_critic


def test_whitening_makes_the_loss_blind_to_shift_and_scale() -> None:
    model = REINFORCE(normalize_advantage=True, **SPACES)
    log_prob, weight = torch.randn(20), torch.randn(20)
    plain = model.policy_loss(log_prob, {"weight": weight})
    moved = model.policy_loss(log_prob, {"weight": 100 * weight + 1000})
    assert moved.item() == pytest.approx(plain.item(), rel=1e-3)
    raw = REINFORCE(**SPACES).policy_loss(log_prob, {"weight": weight})
    assert raw.item() == pytest.approx(-(log_prob * weight).mean().item(), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("psi", PSI)
def test_resumes_bit_for_bit(psi: str, tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: REINFORCE(psi=psi, ent_coef=0.01), lambda: rollouts("CartPole-v1", n_envs=2, n_steps=24), tmp_path
    )


def test_the_seed_decides_everything() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = REINFORCE(psi="baseline")
        fit(model, rollouts("CartPole-v1", n_envs=2, n_steps=16, seed=seed), max_epochs=3)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step", "disabled"])
def test_runs_under_every_way_of_resetting(autoreset_mode: str) -> None:
    model = REINFORCE(psi="return")
    data = rollouts(envs.make_two_steps, n_envs=3, n_steps=7, autoreset_mode=autoreset_mode)
    fit(model, data, max_epochs=2)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("argument", "value"), [("psi", "gae"), ("gamma", 1.5), ("gae_lambda", -0.1)])
def test_bad_arguments_are_named(argument: str, value: Any) -> None:
    with pytest.raises(UsageError, match=argument):
        REINFORCE(**{argument: value})


@pytest.mark.parametrize("algorithm", [REINFORCE, A2C])
@pytest.mark.parametrize("changes", [{"n_epochs": 2}, {"batch_size": 16}])
def test_minibatches_of_a_rollout_are_refused(algorithm: Any, changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{algorithm.__name__}.*n_epochs=1 and batch_size=None"):
        fit(algorithm(), rollouts("CartPole-v1", n_envs=2, n_steps=16, **changes), max_epochs=1)
