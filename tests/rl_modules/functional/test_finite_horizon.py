"""Expected returns over a number of steps: by hand, against the infinite horizon, against enumeration."""

import itertools

import pytest
import torch

from rl_modules import functional as F


def chain() -> tuple[torch.Tensor, torch.Tensor]:
    """State 0: action 0 stays and pays 1, action 1 goes to 1 and pays 0. State 1: pays 5 and ends in 2."""
    transition = torch.zeros(3, 2, 3)
    transition[0, 0, 0] = transition[0, 1, 1] = 1.0
    transition[1, :, 2] = transition[2, :, 2] = 1.0
    reward = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 0.0]])
    return transition, reward


def random_mdp(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    transition = torch.rand(3, 2, 3, generator=g, dtype=torch.float64)
    policy = torch.rand(3, 2, generator=g, dtype=torch.float64)
    reward = torch.randn(3, 2, generator=g, dtype=torch.float64)
    return transition / transition.sum(-1, keepdim=True), reward, policy / policy.sum(-1, keepdim=True)


@pytest.mark.parametrize(("horizon", "best"), [(0, 0.0), (1, 1.0), (2, 5.0), (3, 6.0), (10, 13.0)])
def test_the_best_plan_depends_on_the_steps_that_are_left(horizon, best):
    # Stay as long as two steps remain, then go and collect: (horizon - 2)·1 + 5.
    assert F.finite_horizon_value_iteration(*chain(), horizon)[0] == best


def test_a_stationary_policy_falls_short_of_the_plan_with_a_clock():
    transition, reward = chain()
    stay, go = (torch.tensor([[1.0 - a, a], [1.0, 0.0], [1.0, 0.0]]) for a in (0.0, 1.0))
    assert F.finite_horizon_evaluation(transition, reward, stay, 3)[0] == 3.0
    assert F.finite_horizon_evaluation(transition, reward, go, 3)[0] == 5.0
    # Half of the time each: ½·(1 + V_2) + ½·5 with V_2 = ½·(1 + ½) + ½·5 = 3.25.
    assert F.finite_horizon_evaluation(transition, reward, (stay + go) / 2, 3)[0] == pytest.approx(0.5 * 4.25 + 2.5)


def test_discount_counts_from_the_first_step():
    transition, reward = chain()
    stay = torch.tensor([[1.0, 0.0]] * 3)
    assert F.finite_horizon_evaluation(transition, reward, stay, 3, gamma=0.5)[0] == 1.75
    assert F.finite_horizon_value_iteration(transition, reward, 2, gamma=0.1)[0] == pytest.approx(1.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_horizon_is_the_infinite_one(seed):
    transition, reward, policy = random_mdp(seed)
    # 0.8^200 is 4e-20.
    torch.testing.assert_close(
        F.finite_horizon_evaluation(transition, reward, policy, 200, gamma=0.8),
        F.policy_evaluation(transition, reward, policy, gamma=0.8),
    )
    torch.testing.assert_close(
        F.finite_horizon_value_iteration(transition, reward, 200, gamma=0.8),
        F.value_iteration(transition, reward, gamma=0.8).amax(-1),
    )


def test_no_plan_beats_backward_induction():
    transition, reward, _ = random_mdp(7)
    plans = torch.cartesian_prod(*[torch.arange(2)] * 3)
    values = []
    # Every sequence of deterministic policies over three steps, 8³ of them.
    for first, second, third in itertools.product(plans, repeat=3):
        value = torch.zeros(3, dtype=torch.float64)
        for plan in (third, second, first):
            rows = torch.arange(3)
            value = reward[rows, plan] + transition[rows, plan] @ value
        values.append(value)
    torch.testing.assert_close(F.finite_horizon_value_iteration(transition, reward, 3), torch.stack(values).amax(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"horizon": -1}, "horizon must be a whole number of at least 0, got -1"),
        ({"horizon": 2.5}, "horizon must be a whole number of at least 0, got 2.5"),
        ({"gamma": 1.5}, "gamma must lie in"),
        ({"policy": torch.ones(3, 1)}, "policy has shape"),
        ({"policy": torch.ones(3, 2)}, "policy.* must be a distribution"),
    ],
)
def test_what_cannot_be_evaluated_is_named(change, message):
    transition, reward = chain()
    arguments = {"policy": torch.full((3, 2), 0.5), "horizon": 3, "gamma": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        F.finite_horizon_evaluation(transition, reward, **arguments)
