import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import categorical_projection, dqn_target, quantile_huber_loss

from .helpers import coins, randn, repeatable, seeds


def quantile_loss_by_hand(quantiles, targets, weights):
    total = 0.0
    for row, target_row, weight in zip(quantiles, targets, weights, strict=True):
        for i, quantile in enumerate(row):
            level = (i + 0.5) / len(row)
            for target in target_row:
                error = target - quantile
                huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                total += weight * (1 - level if error < 0 else level) * huber / len(target_row)
    return total / len(quantiles)


def test_hand_worked_quantile_losses():
    # Quantiles 0 and 0 at levels 1/4 and 3/4, target 3 above both: Huber 2.5, so 2.5 (1/4 + 3/4).
    assert quantile_huber_loss(torch.zeros(1, 2), torch.full((1, 1), 3.0)).item() == pytest.approx(2.5)
    # Target -0.5, below both: Huber 1/8, levels 3/4 and 1/4.
    assert quantile_huber_loss(torch.zeros(1, 2), torch.full((1, 1), -0.5)).item() == pytest.approx(0.125)
    # Not symmetric: the lowest quantile above its targets costs 3/4, below them 1/4.
    low = torch.tensor([[-2.0, 0.0]])
    assert quantile_huber_loss(low, torch.zeros(1, 1)).item() == pytest.approx(0.25 * 1.5)
    assert quantile_huber_loss(-low, torch.zeros(1, 1)).item() == pytest.approx(0.75 * 1.5)


@repeatable
@given(seeds, st.integers(1, 5), st.integers(1, 5))
def test_the_quantile_loss_against_its_double_sum(seed, count, targets):
    quantiles, target = 2 * randn(seed, 4, count), 2 * randn(seed + 1, 4, targets)
    weight = randn(seed + 2, 4).abs()
    expected = quantile_loss_by_hand(quantiles.tolist(), target.tolist(), weight.tolist())
    assert quantile_huber_loss(quantiles, target, weight).item() == pytest.approx(expected, abs=1e-12)
    plain = quantile_loss_by_hand(quantiles.tolist(), target.tolist(), [1.0] * 4)
    assert quantile_huber_loss(quantiles, target).item() == pytest.approx(plain, abs=1e-12)


def test_minimising_finds_the_quantiles_of_the_target():
    # κ = 1 smooths the pinball loss below distances of 1, so the target is spread over thousands.
    target = torch.arange(2000.0, dtype=torch.float64).unsqueeze(0)
    quantiles = torch.full((1, 4), 1000.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([quantiles], lr=500.0)
    for _ in range(200):
        optimizer.zero_grad()
        quantile_huber_loss(quantiles, target).backward()
        optimizer.step()
    torch.testing.assert_close(
        quantiles.detach(), torch.tensor([[250.0, 750.0, 1250.0, 1750.0]], dtype=torch.float64), atol=2.0, rtol=0
    )


def test_the_quantile_loss_gives_gradient_to_predictions_only():
    quantiles, target = randn(0, 3, 4).requires_grad_(), randn(1, 3, 5).requires_grad_()
    quantile_huber_loss(quantiles, target).backward()
    assert target.grad is None and quantiles.grad.abs().sum() > 0
    assert torch.autograd.gradcheck(lambda q: quantile_huber_loss(q, target), quantiles)


def test_the_quantile_loss_refuses_by_name():
    with pytest.raises(ValueError, match=r"^quantiles has shape"):
        quantile_huber_loss(torch.zeros(3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"^target_quantiles has shape"):
        quantile_huber_loss(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"^target_quantiles has shape \(1, 2\), expected 3 rows"):
        quantile_huber_loss(torch.zeros(3, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"^weight has shape"):
        quantile_huber_loss(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 1))


def projection_by_hand(reward, terminated, probability, gamma, v_min, v_max):
    """Algorithm 1 of the paper, sample by sample."""
    atoms = len(probability[0])
    step = (v_max - v_min) / (atoms - 1)
    result = [[0.0] * atoms for _ in reward]
    for b, row in enumerate(probability):
        for j, p in enumerate(row):
            z = v_min + j * step
            shifted = reward[b] + (0.0 if terminated[b] else gamma * z)
            position = min(max((min(max(shifted, v_min), v_max) - v_min) / step, 0.0), atoms - 1.0)
            for i in range(atoms):
                result[b][i] += p * min(max(1 - abs(position - i), 0.0), 1.0)
    return torch.tensor(result, dtype=torch.float64)


def test_hand_worked_projections():
    support_probability = torch.tensor([[0.0, 0.5, 0.5]])  # on -1, 0, 1
    false, true = torch.tensor([False]), torch.tensor([True])

    def project(reward, end, gamma):
        return categorical_projection(torch.tensor([reward]), end, support_probability, gamma, -1.0, 1.0)

    torch.testing.assert_close(project(0.0, false, 1.0), support_probability)
    # 0.25 + 0.5 z lands on 0.25 and 0.75.
    torch.testing.assert_close(project(0.25, false, 0.5), torch.tensor([[0.0, 0.5, 0.5]]))
    # 0.5 + 0.5 z lands on 0.5 and 1.
    torch.testing.assert_close(project(0.5, false, 0.5), torch.tensor([[0.0, 0.25, 0.75]]))
    # At an end only the reward counts; beyond the support it is clipped.
    torch.testing.assert_close(project(-0.25, true, 1.0), torch.tensor([[0.25, 0.75, 0.0]]))
    torch.testing.assert_close(project(7.0, true, 1.0), torch.tensor([[0.0, 0.0, 1.0]]))
    torch.testing.assert_close(project(-7.0, false, 1.0), torch.tensor([[1.0, 0.0, 0.0]]))


@repeatable
@given(seeds, st.sampled_from([2, 5, 51]), st.floats(0, 1))
def test_the_projection_against_the_papers_algorithm(seed, atoms, gamma):
    reward, end = 3 * randn(seed, 6), coins(seed, 0.3, 6)
    probability = randn(seed + 1, 6, atoms).softmax(-1)
    result = categorical_projection(reward, end, probability, gamma, -4.0, 5.0)
    expected = projection_by_hand(reward.tolist(), end.tolist(), probability.tolist(), gamma, -4.0, 5.0)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(result.sum(-1), torch.ones(6, dtype=torch.float64))
    per_row = categorical_projection(reward, end, probability, torch.full((6,), gamma, dtype=torch.float64), -4.0, 5.0)
    torch.testing.assert_close(per_row, result)


def test_inside_the_support_the_mean_is_the_target_of_dqn():
    reward, end = randn(0, 8), coins(0, 0.4, 8)
    probability = randn(1, 8, 21).softmax(-1)
    support = torch.linspace(-20, 20, 21, dtype=torch.float64)
    projected = categorical_projection(reward, end, probability, 0.7, -20.0, 20.0)
    expected = dqn_target(reward, end, (probability @ support).unsqueeze(-1), 0.7)
    torch.testing.assert_close(projected @ support, expected)


def test_a_reward_that_is_not_a_number_spoils_its_own_row_alone():
    """On a GPU a place outside of the support would end every later call as well."""
    reward, end = torch.tensor([0.5, torch.nan]), torch.zeros(2, dtype=torch.bool)
    probability = torch.full((2, 4), 0.25)
    projected = categorical_projection(reward, end, probability, 0.9, 0.0, 1.0)
    assert projected[1].isnan().any()
    torch.testing.assert_close(
        projected[:1], categorical_projection(reward[:1], end[:1], probability[:1], 0.9, 0.0, 1.0)
    )


def test_the_projection_is_a_constant_and_refuses_by_name():
    reward, end, probability = torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.full((3, 4), 0.25)
    assert not categorical_projection(reward, end, probability.requires_grad_(), 0.9, 0.0, 1.0).requires_grad
    with pytest.raises(ValueError, match=r"^reward has shape"):
        categorical_projection(reward[:, None], end, probability, 0.9, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^terminated has shape"):
        categorical_projection(reward, end[:2], probability, 0.9, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^next_probability has shape"):
        categorical_projection(reward, end, probability[:2], 0.9, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^next_probability has shape"):
        categorical_projection(reward, end, probability[:, :1], 0.9, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^gamma must lie in"):
        categorical_projection(reward, end, probability, 1.1, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^v_max must be above v_min"):
        categorical_projection(reward, end, probability, 0.9, 1.0, 1.0)
