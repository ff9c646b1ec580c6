import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import (
    adapt_kl_coefficient,
    clip_fraction,
    policy_gradient_loss,
    ppo_clip_loss,
    ppo_penalty_loss,
)

from .helpers import categorical_kl, coins, randn, repeatable, seeds


def clip_loss_by_hand(log_prob, old_log_prob, advantage, epsilon):
    terms = []
    for new, old, a in zip(log_prob.tolist(), old_log_prob.tolist(), advantage.tolist(), strict=True):
        ratio = math.exp(new - old)
        terms.append(min(ratio * a, min(max(ratio, 1 - epsilon), 1 + epsilon) * a))
    return -sum(terms) / len(terms)


def test_policy_gradient_loss_of_a_hand_worked_table():
    log_prob = torch.tensor([-1.0, -2.0, -3.0])
    weight = torch.tensor([1.0, -1.0, 2.0])
    assert policy_gradient_loss(log_prob, weight).item() == pytest.approx((1 - 2 + 6) / 3)
    mask = torch.tensor([True, False, True])
    assert policy_gradient_loss(log_prob, weight, mask).item() == pytest.approx((1 + 6) / 2)


def test_the_policy_gradient_theorem_on_a_bandit():
    # Enumerating all actions with their probabilities, the loss has the gradient of -E[R], exactly.
    logits = randn(0, 5).requires_grad_()
    reward = randn(1, 5)
    probability = logits.softmax(-1)
    (exact,) = torch.autograd.grad(-(probability * reward).sum(), logits)
    loss = policy_gradient_loss(logits.log_softmax(-1), reward * probability.detach() * 5)
    (estimated,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(estimated, exact)


@repeatable
@given(seeds, st.floats(0.01, 1.5))
def test_ppo_clip_loss_equals_its_definition(seed, epsilon):
    log_prob, old, advantage = randn(seed, 50), randn(seed + 1, 50), randn(seed + 2, 50)
    result = ppo_clip_loss(log_prob, old, advantage, epsilon)
    assert result.item() == pytest.approx(clip_loss_by_hand(log_prob, old, advantage, epsilon))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),
        (1.5, 2.0, 2.4, 0.0),  # gained enough: no further reward
        (0.5, 2.0, 1.0, 1.0),  # the wrong way: pulled back at full strength
        (0.9, -2.0, -1.8, -1.8),
        (0.5, -2.0, -1.6, 0.0),
        (1.5, -2.0, -3.0, -3.0),
    ],
)
def test_clipping_stops_gain_but_not_penalty(ratio, advantage, value, slope):
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = ppo_clip_loss(log_prob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage]), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-value)
    assert log_prob.grad.item() == pytest.approx(-slope)


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 88.0, 100.0, 1e4])
def test_a_gain_beyond_the_clip_range_has_gradient_zero_where_the_ratio_is_infinite(log_ratio):
    log_prob = torch.tensor([log_ratio], requires_grad=True)
    loss = ppo_clip_loss(log_prob, torch.zeros(1), torch.ones(1), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-min(math.exp(min(log_ratio, 1)), 1.2))
    assert log_prob.grad.item() == pytest.approx(0, abs=1e-40)
    penalised = ppo_penalty_loss(log_prob, torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.0)
    assert penalised.item() == torch.autograd.grad(penalised, log_prob)[0].item() == 0


def test_the_largest_finite_ratio_has_its_own_gradient():
    log_prob = torch.tensor([88.72283], requires_grad=True)
    ppo_clip_loss(log_prob, torch.zeros(1), -torch.ones(1), 0.2).backward()
    assert log_prob.grad.item() == log_prob.exp().item() < torch.inf == torch.nextafter(log_prob, log_prob + 1).exp()


@pytest.mark.parametrize("clip_range", [0.0, 0.2])
def test_at_ratio_one_ppo_is_the_policy_gradient(clip_range):
    log_prob = randn(0, 30).requires_grad_()
    advantage = randn(1, 30)
    loss = ppo_clip_loss(log_prob, log_prob, advantage, clip_range)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    (expected,) = torch.autograd.grad(policy_gradient_loss(log_prob, advantage), log_prob)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(loss.detach(), -advantage.mean())


def test_ppo_penalty_loss_of_a_hand_worked_table():
    log_prob = torch.tensor([0.0, math.log(2.0)])
    loss = ppo_penalty_loss(log_prob, torch.zeros(2), torch.tensor([1.0, 3.0]), torch.tensor([0.1, 0.3]), beta=0.5)
    assert loss.item() == pytest.approx(-(1.0 + 6.0) / 2 + 0.5 * 0.2)
    scalar = ppo_penalty_loss(log_prob, torch.zeros(2), torch.tensor([1.0, 3.0]), torch.tensor(0.2), beta=0.5)
    torch.testing.assert_close(scalar, loss)


def test_the_penalty_loss_has_the_gradient_of_the_penalised_objective():
    # All actions enumerated under π_old: E_old[ρ A] = E_π[A], and the KL is exact.
    logits = randn(0, 6).requires_grad_()
    old = randn(1, 6).log_softmax(-1)
    advantage, beta = randn(2, 6), 0.7
    log_prob = logits.log_softmax(-1)
    kl = categorical_kl(old.exp(), log_prob.exp())
    objective = (log_prob.exp() * advantage).sum() - beta * kl
    (exact,) = torch.autograd.grad(-objective, logits, retain_graph=True)
    loss = ppo_penalty_loss(log_prob, old, advantage * old.exp() * 6, kl, beta)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, exact)


def test_adapting_the_kl_coefficient():
    assert adapt_kl_coefficient(1.0, 0.0066, 0.01) == 0.5
    assert adapt_kl_coefficient(1.0, 0.0067, 0.01) == 1.0
    assert adapt_kl_coefficient(1.0, 0.0149, 0.01) == 1.0
    assert adapt_kl_coefficient(1.0, 0.0151, 0.01) == 2.0
    assert adapt_kl_coefficient(0.5, torch.tensor(1.0), 0.01) == 1.0
    assert isinstance(adapt_kl_coefficient(1, torch.tensor(0.01), 0.01), float)


def test_adapting_refuses_what_is_no_distance():
    with pytest.raises(ValueError, match="kl must be a number, got nan"):
        adapt_kl_coefficient(1.0, float("nan"), 0.01)
    with pytest.raises(ValueError, match="target"):
        adapt_kl_coefficient(1.0, 0.1, 0.0)
    with pytest.raises(ValueError, match="beta"):
        adapt_kl_coefficient(-1.0, 0.1, 0.01)


def test_clip_fraction_counts_ratios_outside_the_range_on_both_sides():
    log_prob = torch.tensor([0.5, 0.9, 1.1, 1.3]).log().requires_grad_()
    fraction = clip_fraction(log_prob, torch.zeros(4), 0.2)
    assert fraction.item() == 0.5
    assert not fraction.requires_grad


losses = {
    "policy_gradient_loss": lambda lp, old, adv, mask: policy_gradient_loss(lp, adv, mask),
    "ppo_clip_loss": lambda lp, old, adv, mask: ppo_clip_loss(lp, old, adv, 0.2, mask),
    "ppo_penalty_loss": lambda lp, old, adv, mask: ppo_penalty_loss(lp, old, adv, (lp - old).square(), 0.3, mask),
}


@pytest.mark.parametrize("name", losses)
def test_masked_elements_change_nothing_whatever_stands_there(name):
    mask = coins(0, 0.6, 20)
    log_prob, old, advantage = randn(1, 20), randn(2, 20), randn(3, 20)
    expected = losses[name](log_prob[mask], old[mask], advantage[mask], None)
    for garbage in (1e4, torch.nan, -torch.inf):
        dirty = log_prob.masked_fill(~mask, garbage).requires_grad_()
        loss = losses[name](dirty, *(x.masked_fill(~mask, garbage) for x in (old, advantage)), mask)
        torch.testing.assert_close(loss.detach(), expected)
        (gradient,) = torch.autograd.grad(loss, dirty)
        assert (gradient[~mask] == 0).all() or name == "ppo_penalty_loss"  # its kl is built outside, here
        assert gradient[mask].isfinite().all()


@pytest.mark.parametrize("name", losses)
def test_a_fully_masked_batch_has_loss_and_gradient_zero(name):
    log_prob = randn(0, 4).requires_grad_()
    loss = losses[name](log_prob, randn(1, 4), randn(2, 4), torch.zeros(4))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", losses)
def test_only_the_current_policy_receives_gradient(name):
    log_prob, old, advantage = (randn(i, 8).requires_grad_() for i in range(3))
    # The penalty's KL is the caller's; computed from constants it isolates what the loss itself lets through.
    if name == "ppo_penalty_loss":
        loss = ppo_penalty_loss(log_prob, old, advantage, randn(3, 8).abs(), 0.3)
    else:
        loss = losses[name](log_prob, old, advantage, None)
    loss.backward()
    assert log_prob.grad.abs().sum() > 0
    assert old.grad is None
    assert advantage.grad is None


@pytest.mark.parametrize("name", losses)
def test_bfloat16_is_averaged_in_float32(name):
    log_prob = torch.zeros(1000, dtype=torch.bfloat16)
    advantage = torch.ones(1000, dtype=torch.bfloat16)
    loss = losses[name](log_prob, log_prob, advantage, torch.ones(1000))
    assert loss.dtype is torch.float32
    assert loss.item() == (0.0 if name == "policy_gradient_loss" else -1.0)


@pytest.mark.parametrize("name", losses)
def test_a_column_is_refused_instead_of_broadcast(name):
    row, column = torch.zeros(5), torch.zeros(5, 1)
    with pytest.raises(ValueError, match=r"^(advantage|weight) has shape \(5, 1\), expected \(5,\)"):
        losses[name](row, row, column, None)
    with pytest.raises(ValueError, match=r"^mask has shape \(5, 1\)"):
        losses[name](row, row, row, column)


def test_other_wrong_shapes_are_refused_by_name():
    row, column = torch.zeros(5), torch.zeros(5, 1)
    for function in (lambda: ppo_clip_loss(row, column, row, 0.2), lambda: clip_fraction(row, column, 0.2)):
        with pytest.raises(ValueError, match=r"^old_log_prob has shape"):
            function()
    with pytest.raises(ValueError, match=r"^kl has shape"):
        ppo_penalty_loss(row, row, row, column, 0.2)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_numbers_outside_their_range_are_refused(bad):
    row = torch.zeros(5)
    with pytest.raises(ValueError, match="clip_range"):
        ppo_clip_loss(row, row, row, bad)
    with pytest.raises(ValueError, match="clip_range"):
        clip_fraction(row, row, bad)
    with pytest.raises(ValueError, match="beta"):
        ppo_penalty_loss(row, row, row, row, bad)
