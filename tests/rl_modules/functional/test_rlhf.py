import pytest
import torch
from hypothesis import given

from rl_modules.functional import proportional_kl_coefficient, rlhf_rewards

from .helpers import coins, randn, repeatable, seeds


def test_a_hand_worked_table():
    score = torch.tensor([10.0, 20.0, 30.0])
    log_prob = torch.tensor([[-1.0, -2.0, -3.0]] * 3)
    reference = torch.tensor([[-2.0, -2.0, -1.0]] * 3)
    # Full, right-padded, and without a single token.
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    expected = torch.tensor([[-0.1, 0.0, 10.2], [-0.1, 20.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(rlhf_rewards(score, log_prob, reference, mask, beta=0.1), expected)


def test_the_score_goes_to_the_last_counted_token_also_past_a_gap_or_left_padding():
    zero = torch.zeros(2, 5)
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 1, 1]])
    rewards = rlhf_rewards(torch.tensor([7.0, 9.0]), zero, zero, mask, beta=0.5)
    torch.testing.assert_close(rewards, torch.tensor([[0.0, 0, 0, 7, 0], [0, 0, 0, 0, 9]]))


@repeatable
@given(seeds)
def test_the_sum_over_tokens_is_the_score_minus_the_price_of_the_sequence(seed):
    score, log_prob, reference = randn(seed, 6), randn(seed + 1, 6, 8), randn(seed + 2, 6, 8)
    mask = coins(seed, 0.6, 6, 8)
    mask[:, 0] = True
    rewards = rlhf_rewards(score, log_prob, reference, mask, beta=0.3)
    expected = score - 0.3 * ((log_prob - reference) * mask).sum(-1)
    torch.testing.assert_close(rewards.sum(-1), expected)
    assert (rewards[~mask] == 0).all()


def test_padding_may_be_anything_and_more_of_it_changes_nothing():
    score, log_prob, reference = randn(0, 3), randn(1, 3, 4), randn(2, 3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    plain = rlhf_rewards(score, log_prob, reference, mask, 0.1)
    garbage = torch.full((3, 2), torch.nan, dtype=torch.float64)
    padded = rlhf_rewards(
        score,
        torch.cat((log_prob, garbage), 1),
        torch.cat((reference, garbage), 1),
        torch.cat((mask, torch.zeros(3, 2, dtype=torch.bool)), 1),
        0.1,
    )
    torch.testing.assert_close(padded, torch.cat((plain, torch.zeros(3, 2).double()), 1))


def test_rewards_are_constants_in_float32():
    log_prob = torch.zeros(2, 3, requires_grad=True)
    rewards = rlhf_rewards(torch.ones(2, requires_grad=True), log_prob, log_prob, torch.ones(2, 3), 0.1)
    assert not rewards.requires_grad
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert rlhf_rewards(half[:, 0], half, half, half + 1, 0.1).dtype is torch.float32


def test_without_a_price_what_the_reference_forbids_is_as_good_as_any():
    log_prob, mask = torch.full((1, 2), -0.5), torch.ones(1, 2)
    ref_log_prob = torch.tensor([[-torch.inf, -1.0]])
    assert rlhf_rewards(torch.tensor([3.0]), log_prob, ref_log_prob, mask, 0.0).tolist() == [[0.0, 3.0]]
    assert rlhf_rewards(torch.tensor([3.0]), log_prob, ref_log_prob, mask, 1.0).tolist() == [[-torch.inf, 2.5]]


def test_refuses_by_name():
    score, square = torch.zeros(2), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^score has shape"):
        rlhf_rewards(square, square, square, square, 0.1)
    with pytest.raises(ValueError, match=r"^log_prob has shape"):
        rlhf_rewards(score, score, score, score, 0.1)
    with pytest.raises(ValueError, match=r"^ref_log_prob has shape"):
        rlhf_rewards(score, square, score, square, 0.1)
    with pytest.raises(ValueError, match=r"^mask has shape"):
        rlhf_rewards(score, square, square, score, 0.1)
    with pytest.raises(ValueError, match=r"^beta"):
        rlhf_rewards(score, square, square, square, -0.1)
    with pytest.raises(ValueError, match=r"^beta must be .*got '0.1'"):
        rlhf_rewards(score, square, square, square, "0.1")


@pytest.mark.parametrize(
    ("kl", "factor"),
    # By hand from section 2.2 of Ziegler et al.: the error of 0, within the clip, and beyond it on either side.
    [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98)],
)
def test_the_controller_moves_beta_in_proportion_to_the_error_up_to_a_clip(kl, factor):
    assert proportional_kl_coefficient(0.15, kl, target=6.0) == pytest.approx(0.15 * factor)
    assert proportional_kl_coefficient(0.15, torch.tensor(kl), 6.0, gain=0.2) == pytest.approx(
        0.15 * (1 + 2 * (factor - 1))
    )


def test_the_controller_finds_the_price_that_holds_the_target():
    beta = 1.0
    for _ in range(1000):  # A policy whose KL falls as 1/β holds KL = 4 at β = 1/2.
        beta = proportional_kl_coefficient(beta, 2 / beta, target=4.0)
    assert beta == pytest.approx(0.5, rel=1e-3)


def test_the_controller_refuses_by_name():
    for name, arguments in {
        "beta": (-1.0, 1.0, 1.0),
        "target": (1.0, 1.0, 0.0),
        "kl": (1.0, float("nan"), 1.0),
        "gain": (1.0, 1.0, 1.0, 5.0),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} must"):
            proportional_kl_coefficient(*arguments)
