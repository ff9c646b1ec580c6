import math

import pytest
import torch
from hypothesis import given
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from rl_modules.functional import soft_q_target, squashed_gaussian_log_prob

from .helpers import coins, randn, repeatable, seeds


def test_hand_worked_soft_targets():
    reward, end = torch.tensor([1.0, 1.0]), torch.tensor([False, True])
    # 1 + 0.5 (4 - 0.25 (-2)) = 3.25
    target = soft_q_target(reward, end, torch.full((2,), 4.0), torch.full((2,), -2.0), 0.25, 0.5)
    torch.testing.assert_close(target, torch.tensor([3.25, 1.0]))


@repeatable
@given(seeds)
def test_soft_targets_against_python_numbers(seed):
    reward, next_q, log_prob = randn(seed, 5), randn(seed + 1, 5), randn(seed + 2, 5)
    end = coins(seed, 0.4, 5)
    expected = [
        r + 0.9 * (0.0 if e else q - 0.3 * p)
        for r, e, q, p in zip(reward.tolist(), end.tolist(), next_q.tolist(), log_prob.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(soft_q_target(reward, end, next_q, log_prob, 0.3, 0.9), expected)
    alpha, gamma = torch.tensor([0.3], dtype=torch.float64), torch.full((5,), 0.9, dtype=torch.float64)
    torch.testing.assert_close(soft_q_target(reward, end, next_q, log_prob, alpha, gamma), expected)


def test_without_temperature_it_is_the_td_target_and_a_constant():
    reward, end = randn(0, 4), coins(1, 0.5, 4)
    next_q, log_prob = randn(2, 4).requires_grad_(), randn(3, 4)
    target = soft_q_target(reward, end, next_q, log_prob, 0.0, 0.9)
    assert not target.requires_grad
    torch.testing.assert_close(target, reward + 0.9 * next_q.detach() * ~end)
    # What stands at an end may be anything.
    assert soft_q_target(reward, torch.ones(4), next_q / 0, log_prob, 0.1, 0.9).isfinite().all()


def test_soft_targets_refuse_by_name():
    row, column = torch.zeros(3), torch.zeros(3, 1)
    for name, arguments in {
        "terminated": (row, column, row, row),
        "next_q": (row, row, column, row),
        "next_log_prob": (row, row, row, column),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            soft_q_target(*arguments, 0.1, 0.9)
    with pytest.raises(ValueError, match=r"^alpha has shape"):
        soft_q_target(row, row, row, row, row, 0.9)
    with pytest.raises(ValueError, match=r"^alpha must be"):
        soft_q_target(row, row, row, row, -0.1, 0.9)
    with pytest.raises(ValueError, match=r"^gamma must lie"):
        soft_q_target(row, row, row, row, 0.1, 1.5)


def test_the_density_of_a_squashed_standard_normal_at_zero():
    zero = torch.zeros(1, 3)
    # tanh has slope 1 at 0.
    expected = -1.5 * math.log(2 * math.pi)
    assert squashed_gaussian_log_prob(zero, zero, zero).item() == pytest.approx(expected)


@repeatable
@given(seeds)
def test_against_torchs_transformed_distribution(seed):
    mean, log_std, noise = randn(seed, 6, 3), 0.5 * randn(seed + 1, 6, 3), randn(seed + 2, 6, 3)
    inputs = [x.requires_grad_() for x in (mean, log_std, noise)]
    u = mean + log_std.exp() * noise
    peer = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    action = peer.transforms[0](u)
    ours, expected = squashed_gaussian_log_prob(mean, log_std, u), peer.log_prob(action)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    gradient = torch.autograd.grad(ours.sum(), inputs, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), inputs), atol=1e-9, rtol=1e-9)


def test_the_density_integrates_to_one():
    action = torch.linspace(-1, 1, 200_002, dtype=torch.float64)[1:-1].unsqueeze(-1)
    mean, log_std = torch.full_like(action, 0.4), torch.full_like(action, -0.3)
    density = squashed_gaussian_log_prob(mean, log_std, action.atanh()).exp()
    assert torch.trapezoid(density, action.squeeze(-1)).item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_far_out_where_tanh_rounds_to_one(dtype):
    decimal = pytest.importorskip("decimal")
    decimal.getcontext().prec = 60
    for value in (-20.0, -12.0, -0.001, 0.3, 9.0, 12.0, 20.0):
        u = torch.full((1, 1), value, dtype=dtype, requires_grad=True)
        # A Gaussian centred at u has the constant log-density -½ log 2π there: what is left is the slope of tanh.
        log_slope = -squashed_gaussian_log_prob(u.detach(), torch.zeros_like(u), u) - 0.5 * math.log(2 * math.pi)
        exact = decimal.Decimal(u.item())
        cosh = (exact.exp() + (-exact).exp()) / 2
        tolerance = 1e-6 if dtype is torch.float32 else 1e-14
        assert log_slope.item() == pytest.approx(float(-2 * cosh.ln()), rel=tolerance, abs=2 * tolerance)
        (slope,) = torch.autograd.grad(log_slope.sum(), u)
        assert slope.item() == pytest.approx(-2 * math.tanh(u.item()), rel=1e-5, abs=1e-5)


def test_squashed_densities_refuse_by_name():
    rows = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"^log_std has shape"):
        squashed_gaussian_log_prob(rows, rows[0], rows)
    with pytest.raises(ValueError, match=r"^pre_tanh has shape"):
        squashed_gaussian_log_prob(rows, rows, rows[:, :1])
    with pytest.raises(ValueError, match=r"^mean has shape"):
        squashed_gaussian_log_prob(rows[0, 0], rows[0, 0], rows[0, 0])
