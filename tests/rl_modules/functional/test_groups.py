import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import (
    batch_advantages,
    combine_rewards,
    gdpo_advantages,
    group_advantages,
    rloo_advantages,
)

from .helpers import coins, randn, repeatable, seeds

NAN = float("nan")


def by_hand(rewards, size, scale):
    scored = [r for r in rewards if r == r]
    result = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        kept = [r for r in group if r == r]
        flat = len(set(kept)) < 2
        for r in group:
            if r != r or flat:
                result.append(0.0)
                continue
            spread = {"group": kept, "batch": scored}.get(scale)
            divisor = 1.0 if spread is None else statistics.stdev(spread) + 1e-4
            result.append((r - statistics.mean(kept)) / divisor)
    return result


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [-1.0, 1.0, 2.0, -2.0]),
        # sample deviations √2 and √8; of all four (0, 2, 5, 1; mean 2) √(14/3)
        ("group", [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4), -2 / (8**0.5 + 1e-4)]),
        ("batch", [x / ((14 / 3) ** 0.5 + 1e-4) for x in (-1.0, 1.0, 2.0, -2.0)]),
    ],
)
def test_hand_worked_groups_of_two(scale, expected):
    result = group_advantages(torch.tensor([0.0, 2.0, 5.0, 1.0]), 2, scale)
    torch.testing.assert_close(result, torch.tensor(expected))


@repeatable
@given(seeds, st.sampled_from([2, 3, 4]), st.sampled_from(["group", "batch", "none"]))
def test_against_the_statistics_module_with_unscored_answers(seed, size, scale):
    reward = randn(seed, 12).masked_fill(coins(seed, 0.3, 12), torch.nan)
    reward[:2] = torch.tensor([0.0, 1.0])  # one group at least has a spread
    expected = torch.tensor(by_hand(reward.tolist(), size, scale), dtype=torch.float64)
    torch.testing.assert_close(group_advantages(reward, size, scale), expected)


@repeatable
@given(seeds, st.floats(-100, 100), st.floats(0.5, 50))
def test_affine_maps_of_the_reward(seed, shift, scale):
    reward = randn(seed, 12)
    for kind in ("group", "batch"):
        plain = group_advantages(reward, 4, kind)
        # Exact but for the 1e-4 beside the standard deviation.
        torch.testing.assert_close(group_advantages(reward * scale + shift, 4, kind), plain, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        group_advantages(reward * scale + shift, 4, "none"), group_advantages(reward, 4, "none") * scale
    )
    assert group_advantages(reward, 4).view(-1, 4).sum(-1).abs().max() < 1e-9


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_without_spread_give_exactly_zero(scale):
    # The mean of seven times 0.1 is not 0.1 in float32; a naive quotient makes 1e-5 to 1e-4 of that.
    reward = torch.cat((torch.full((7,), 0.1), torch.arange(7.0)))
    result = group_advantages(reward, 7, scale)
    assert (result[:7] == 0).all()
    assert (result[7:].abs() > 0.1).sum() == 6
    assert (group_advantages(torch.full((14,), 1e6 + 0.1), 7, scale) == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_what_was_not_scored_gets_zero_and_changes_nothing_else(scale):
    reward = torch.tensor([1.0, NAN, 3.0, NAN, NAN, NAN, 5.0, NAN, NAN])
    result = group_advantages(reward, 3, scale)
    assert result.isfinite().all()
    assert (result[[1, 3, 4, 5, 7, 8]] == 0).all()
    assert result[6] == 0  # alone in its group: nothing to compare it with
    assert result[0] == -result[2] < 0
    assert (group_advantages(torch.full((4,), NAN), 2, scale) == 0).all()


def test_groups_are_neighbours_and_do_not_mix():
    reward = randn(0, 12)
    changed = reward.clone()
    changed[:4] += randn(1, 4)
    torch.testing.assert_close(group_advantages(changed, 4)[4:], group_advantages(reward, 4)[4:], rtol=0, atol=0)


def test_advantages_are_constants_and_rewards_stay_as_they_are():
    reward = randn(0, 8).requires_grad_()
    copy = reward.detach().clone()
    assert not group_advantages(reward, 4).requires_grad
    assert torch.equal(reward, copy)
    assert group_advantages(copy.bfloat16(), 4).dtype is torch.float32


def test_refuses_by_name():
    with pytest.raises(ValueError, match=r"^reward has 5 elements, expected a multiple of num_generations = 2"):
        group_advantages(torch.zeros(5), 2)
    with pytest.raises(ValueError, match=r"^reward has shape"):
        group_advantages(torch.zeros(4, 1), 2)
    with pytest.raises(ValueError, match=r"^num_generations must be at least 2"):
        group_advantages(torch.zeros(4), 1)
    with pytest.raises(ValueError, match=r"^scale_rewards must be one of"):
        group_advantages(torch.zeros(4), 2, "all")


def test_combined_rewards_leave_out_what_does_not_apply():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 2.0], [nan, 2.0], [nan, nan]])
    expected = torch.tensor([2.0, 1.0, nan])
    torch.testing.assert_close(combine_rewards(rewards, [1.0, 0.5]), expected, equal_nan=True)
    torch.testing.assert_close(combine_rewards(rewards), torch.tensor([3.0, 2.0, nan]), equal_nan=True)
    with pytest.raises(ValueError, match="weights has 1 elements, expected 2"):
        combine_rewards(rewards, [1.0])
    with pytest.raises(ValueError, match="rewards has shape"):
        combine_rewards(rewards[0])


@repeatable
@given(seeds, st.sampled_from([2, 3, 4]))
def test_leave_one_out_against_the_mean_of_the_others(seed, size):
    reward = randn(seed, 12).masked_fill(coins(seed, 0.3, 12), torch.nan)
    expected = []
    for start in range(0, 12, size):
        group = reward[start : start + size].tolist()
        for i, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i and x == x]
            expected.append(r - statistics.mean(others) if r == r and others else 0.0)
    torch.testing.assert_close(rloo_advantages(reward, size), torch.tensor(expected, dtype=torch.float64))


def test_hand_worked_leave_one_out():
    result = rloo_advantages(torch.tensor([1.0, 2.0, 6.0, 0.0, 4.0, NAN]), 3)
    torch.testing.assert_close(result, torch.tensor([-3.0, -1.5, 4.5, -4.0, 4.0, 0.0]))
    assert (rloo_advantages(torch.full((7,), 0.1), 7) == 0).all()
    assert (rloo_advantages(torch.tensor([NAN, 1.0]), 2) == 0).all()
    assert not rloo_advantages(randn(0, 4).requires_grad_(), 2).requires_grad


def test_leave_one_out_is_a_multiple_of_dr_grpos_advantage():
    reward = randn(0, 12)
    torch.testing.assert_close(rloo_advantages(reward, 4), group_advantages(reward, 4, "none") * 4 / 3)


def test_leave_one_out_refuses_by_name():
    with pytest.raises(ValueError, match=r"^reward has 5 elements"):
        rloo_advantages(torch.zeros(5), 2)
    with pytest.raises(ValueError, match=r"^reward has shape"):
        rloo_advantages(torch.zeros(4, 1), 2)
    with pytest.raises(ValueError, match=r"^num_generations must be at least 2"):
        rloo_advantages(torch.zeros(4), 1)


# -------------------------------------------------------------------- GDPO


def test_gdpo_advantages_by_hand():
    """The second function's rewards are a thousand times the first's, and count as much; the last row is unscored."""
    rewards = torch.tensor([[0.0, 1000.0], [1.0, 0.0], [1.0, NAN], [0.0, NAN], [2.0, 5.0], [NAN, NAN]])
    half = 0.5**0.5
    sums = torch.tensor([-half + half, half - half, half, -half, 0.0])
    expected = [*((sums - sums.mean()) / (sums.std() + 1e-4)), 0.0]
    torch.testing.assert_close(gdpo_advantages(rewards, 2), torch.tensor(expected), atol=1e-3, rtol=0)
    weighted = gdpo_advantages(rewards[:2], 2, [1.0, 3.0])  # -half + 3 half and half - 3 half
    torch.testing.assert_close(weighted, torch.tensor([half, -half]), atol=1e-3, rtol=0)


# -------------------------------------------------------------------- REINFORCE++


def test_batch_advantages_by_hand():
    # mean 2, sample standard deviation √(14/3); the third was not scored
    result = batch_advantages(torch.tensor([0.0, 2.0, NAN, 5.0, 1.0]))
    expected = [x / ((14 / 3) ** 0.5 + 1e-4) for x in (-2.0, 0.0, 0.0, 3.0, -1.0)]
    torch.testing.assert_close(result, torch.tensor(expected))


def test_batch_advantages_of_equal_rewards_are_exactly_0():
    assert torch.equal(batch_advantages(torch.tensor([0.1, NAN, 0.1, 0.1])), torch.zeros(4))


@repeatable
@given(seeds)
def test_batch_advantages_have_mean_0_and_do_not_see_the_prompts(seed):
    reward, order = randn(seed, 12), torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    result = batch_advantages(reward)
    assert result.mean().abs() < 1e-6
    torch.testing.assert_close(result.std(), torch.ones_like(result.std()), atol=1e-3, rtol=0)
    torch.testing.assert_close(batch_advantages(reward[order]), result[order])


def test_no_answers_have_no_advantages():
    assert batch_advantages(torch.zeros(0)).shape == (0,)
    assert group_advantages(torch.zeros(0), 2).shape == (0,)


def test_batch_advantages_refuse_a_matrix():
    with pytest.raises(ValueError, match="reward"):
        batch_advantages(torch.zeros(2, 3))
