import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import dynamic_programming, policy_evaluation, value_iteration

from .helpers import randn, repeatable, seeds


def random_mdp(seed: int, states: int, actions: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(seed, states, actions, states).softmax(-1), randn(seed + 1, states, actions)


def corridor(length: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells 0..length-1, actions left and right, -1 a step; the right end leads to an absorbing state."""
    states = length + 1
    transition = torch.zeros(states, 2, states, dtype=dtype)
    reward = torch.full((states, 2), -1.0, dtype=dtype)
    for cell in range(length):
        transition[cell, 0, max(cell - 1, 0)] = 1
        transition[cell, 1, cell + 1] = 1
    transition[length, :, length] = 1
    reward[length] = 0
    return transition, reward


def test_the_value_of_a_policy_of_a_hand_worked_chain():
    # Two states: from 0, reward 1 and on to 1 with probability .5; state 1 pays 2 and stays. γ = .5:
    # V(1) = 2 / (1 - .5) = 4;  V(0) = 1 + .5 (.5 V(0) + .5 * 4), so V(0) = 2 / .75.
    transition = torch.tensor([[[0.5, 0.5]], [[0.0, 1.0]]])
    reward = torch.tensor([[1.0], [2.0]])
    value = policy_evaluation(transition, reward, torch.ones(2, 1), gamma=0.5)
    torch.testing.assert_close(value, torch.tensor([2 / 0.75, 4.0]))


@repeatable
@given(seeds, st.floats(0, 0.99))
def test_the_value_solves_bellmans_equation(seed, gamma):
    transition, reward = random_mdp(seed, 6, 3)
    policy = randn(seed + 2, 6, 3).softmax(-1)
    value = policy_evaluation(transition, reward, policy, gamma)
    q = reward + gamma * torch.einsum("sat,t->sa", transition, value)
    torch.testing.assert_close((policy * q).sum(-1), value)


@pytest.mark.long
@repeatable
@given(seeds)
def test_the_value_is_the_sum_of_discounted_rewards(seed):
    transition, reward = random_mdp(seed, 4, 2)
    policy = randn(seed + 2, 4, 2).softmax(-1)
    distribution, total = torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for step in range(400):
        total += 0.9**step * distribution @ (policy * reward).sum(-1)
        distribution = distribution @ torch.einsum("sa,sat->st", policy, transition)
    torch.testing.assert_close(policy_evaluation(transition, reward, policy, 0.9), total)


@repeatable
@given(seeds, st.sampled_from([0.0, 0.5, 0.95]))
def test_optimal_values_equal_the_best_of_all_deterministic_policies(seed, gamma):
    transition, reward = random_mdp(seed, 3, 2)
    values = []
    for choice in itertools.product(range(2), repeat=3):
        policy = torch.eye(2, dtype=torch.float64)[list(choice)]
        values.append(policy_evaluation(transition, reward, policy, gamma))
    best = torch.stack(values).amax(0)
    q = value_iteration(transition, reward, gamma, tolerance=1e-10)
    torch.testing.assert_close(q.amax(-1), best, atol=1e-9, rtol=0)
    torch.testing.assert_close(q, reward + gamma * torch.einsum("sat,t->sa", transition, best), atol=1e-9, rtol=0)


@pytest.mark.parametrize("tolerance", [1.0, 1e-2, 1e-6])
def test_the_tolerance_bounds_the_error_and_not_the_last_change(tolerance):
    # One state that pays 1 for ever: Q* = 1 / (1 - γ) = 100, and each sweep closes only 1 % of the gap.
    q = value_iteration(torch.ones(1, 1, 1), torch.ones(1, 1), gamma=0.99, tolerance=tolerance)
    assert 100 - q.item() <= tolerance + 1e-5
    if tolerance == 1.0:
        assert 100 - q.item() > 0.5  # it did stop


def test_undiscounted_steps_to_the_exit():
    transition, reward = corridor(4)
    q = value_iteration(transition, reward, gamma=1.0)
    torch.testing.assert_close(q.amax(-1), torch.tensor([-4.0, -3.0, -2.0, -1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(q[1, 0].item(), -5.0)
    right = torch.tensor([[0.0, 1.0]]).double().expand(5, 2)
    torch.testing.assert_close(policy_evaluation(transition, reward, right, 1.0), q.amax(-1))
    # The drunkard's walk with a reflecting left wall needs n(n + 1) - k(k + 1) steps from cell k.
    drunk = policy_evaluation(transition, reward, torch.full((5, 2), 0.5).double(), 1.0)
    torch.testing.assert_close(drunk, -torch.tensor([20.0, 18.0, 14.0, 8.0, 0.0], dtype=torch.float64))


def test_an_undiscounted_policy_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(dynamic_programming, "_MAX_UNDISCOUNTED_SWEEPS", 1000)
    transition, reward = corridor(3)
    left = torch.tensor([[1.0, 0.0]]).double().expand(4, 2)
    with pytest.raises(ValueError, match=r"state 0 never reaches an absorbing state"):
        policy_evaluation(transition, reward, left, 1.0)
    with pytest.raises(ValueError, match=r"never reaches an absorbing state"):
        policy_evaluation(torch.ones(1, 1, 1), torch.ones(1, 1), torch.ones(1, 1), 1.0)
    with pytest.raises(ValueError, match=r"gamma is 1 and the values still change"):
        value_iteration(torch.ones(1, 1, 1), torch.ones(1, 1), 1.0)


def test_float32_problems_with_a_long_horizon_keep_their_digits():
    # 1 / (1 - γ) = 10,000 would magnify float32's rounding to 1e-3; the sums run in float64.
    states = 30
    transition = randn(0, states, 2, states).softmax(-1)
    reward = randn(1, states, 2)
    policy = torch.full((states, 2), 0.5)
    exact = policy_evaluation(transition.float().double(), reward.float().double(), policy.double(), 0.9999)
    result = policy_evaluation(transition.float(), reward.float(), policy, 0.9999)
    assert result.dtype is torch.float32
    assert exact.dtype is torch.float64
    torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=1e-6)
    assert value_iteration(transition.float(), reward.float(), 0.9).dtype is torch.float32


def test_results_are_constants_and_inputs_stay_as_they_are():
    transition, reward = random_mdp(0, 3, 2)
    policy = torch.full((3, 2), 0.5).double()
    inputs = [x.clone().requires_grad_() for x in (transition, reward, policy)]
    assert not policy_evaluation(*inputs, 0.9).requires_grad
    assert not value_iteration(*inputs[:2], 0.9).requires_grad
    assert torch.equal(inputs[0], transition)
    assert torch.equal(inputs[1], reward)
    assert torch.equal(inputs[2], policy)


def test_an_unreachable_tolerance_ends_at_rounding():
    transition, reward = random_mdp(0, 3, 2)
    q = value_iteration(transition, reward, gamma=0.9, tolerance=1e-300)
    torch.testing.assert_close(q, reward + 0.9 * (transition @ q.amax(-1)), rtol=1e-14, atol=1e-14)


def test_refuses_by_name():
    transition, reward = random_mdp(0, 3, 2)
    policy = torch.full((3, 2), 0.5).double()
    with pytest.raises(ValueError, match=r"^transition has shape \(2, 3, 3\), expected \(3, 2, 3\)"):
        value_iteration(transition.transpose(0, 1), reward, 0.9)
    with pytest.raises(ValueError, match=r"^reward has shape"):
        value_iteration(transition, reward[0], 0.9)
    with pytest.raises(ValueError, match=r"^policy has shape"):
        policy_evaluation(transition, reward, policy[:, :1], 0.9)
    with pytest.raises(ValueError, match=r"^transition\[0, 0\] must be a distribution"):
        value_iteration(transition * 0.9, reward, 0.9)
    with pytest.raises(ValueError, match=r"^transition\[0, 0\] must be a distribution"):
        value_iteration(transition * torch.nan, reward, 0.9)
    negative = policy.clone()
    negative[1] = torch.tensor([-0.5, 1.5])
    with pytest.raises(ValueError, match=r"^policy\[1\] must be a distribution"):
        policy_evaluation(transition, reward, negative, 0.9)
    with pytest.raises(ValueError, match=r"^gamma"):
        value_iteration(transition, reward, 1.1)
    with pytest.raises(ValueError, match=r"^tolerance"):
        value_iteration(transition, reward, 0.9, tolerance=0.0)
