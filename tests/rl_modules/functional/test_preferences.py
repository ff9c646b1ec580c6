import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import bradley_terry_loss

from .helpers import randn, repeatable, seeds


def test_hand_worked_losses():
    zero = torch.zeros(3)
    assert bradley_terry_loss(zero, zero).item() == pytest.approx(math.log(2))
    # A lead of log 3 wins with probability 3/4.
    lead = torch.full((1,), math.log(3.0))
    assert bradley_terry_loss(lead, zero[:1]).item() == pytest.approx(-math.log(0.75))
    assert bradley_terry_loss(zero[:1], lead).item() == pytest.approx(-math.log(0.25))
    assert bradley_terry_loss(lead, zero[:1], margin=lead).item() == pytest.approx(math.log(2))
    ones = torch.ones(3)
    assert bradley_terry_loss(ones, ones, center_rewards_coefficient=0.1).item() == pytest.approx(math.log(2) + 0.4)


@repeatable
@given(seeds, st.floats(-5, 5))
def test_only_differences_count_until_rewards_are_centred(seed, shift):
    chosen, rejected = randn(seed, 8), randn(seed + 1, 8)
    plain = bradley_terry_loss(chosen, rejected)
    torch.testing.assert_close(bradley_terry_loss(chosen + shift, rejected + shift), plain)
    centred = bradley_terry_loss(chosen + shift, rejected + shift, center_rewards_coefficient=0.5)
    torch.testing.assert_close(centred, plain + 0.5 * (chosen + rejected + 2 * shift).square().mean())


def test_the_gradient_is_the_probability_of_being_wrong():
    chosen, rejected, margin = randn(0, 5).requires_grad_(), randn(1, 5).requires_grad_(), randn(2, 5).requires_grad_()
    bradley_terry_loss(chosen, rejected, margin).backward()
    wrong = torch.sigmoid(rejected - chosen + margin).detach() / 5
    torch.testing.assert_close(chosen.grad, -wrong)
    torch.testing.assert_close(rejected.grad, wrong)
    assert margin.grad is None


def test_hopeless_pairs_do_not_overflow():
    loss = bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert loss.item() == pytest.approx(2e4)


def test_bfloat16_is_averaged_in_float32():
    one = torch.ones(1000, dtype=torch.bfloat16)
    loss = bradley_terry_loss(one, one)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(math.log(2))


def test_refuses_by_name():
    row, column = torch.zeros(4), torch.zeros(4, 1)
    with pytest.raises(ValueError, match=r"^rejected_reward has shape"):
        bradley_terry_loss(row, column)
    with pytest.raises(ValueError, match=r"^margin has shape"):
        bradley_terry_loss(row, row, column)
    with pytest.raises(ValueError, match=r"^center_rewards_coefficient"):
        bradley_terry_loss(row, row, center_rewards_coefficient=-0.1)
