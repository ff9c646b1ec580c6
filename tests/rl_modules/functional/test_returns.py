import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import discounted_returns, dqn_target, gae, n_step_returns, n_step_rewards

from .helpers import coins, gae_sum, n_step_sum, randn, random_rollout, repeatable, seeds

STEPS_AROUND_THE_SWITCH_TO_THE_SCAN = [1, 2, 3, 5, 15, 16, 17, 18, 31, 32, 33, 34, 35, 63, 70, 129]


def table() -> dict[str, torch.Tensor]:
    """Rewards 0..7; terminated at 0, 3 and 7; truncated at 5, where the final observation is worth 100."""
    return {
        "reward": torch.arange(8.0),
        "next_value": torch.full((8,), 100.0),
        "terminated": torch.tensor([1, 0, 0, 1, 0, 0, 0, 1], dtype=torch.bool),
        "truncated": torch.tensor([0, 0, 0, 0, 0, 1, 0, 0], dtype=torch.bool),
    }


def test_discounted_returns_of_a_hand_worked_table():
    # 4 + .1 (5 + .1 * 100) = 5.5 and 5 + .1 * 100 = 15: bootstrapped at the truncation, and only there.
    expected = torch.tensor([0.0, 1.23, 2.3, 3.0, 5.5, 15.0, 6.7, 7.0])
    torch.testing.assert_close(discounted_returns(**table(), gamma=0.1), expected)


def test_the_last_row_bootstraps_while_the_episode_goes_on():
    rollout = table()
    rollout["terminated"][7] = False
    expected = torch.tensor([0.0, 1.23, 2.3, 3.0, 5.5, 15.0, 7.7, 17.0])
    torch.testing.assert_close(discounted_returns(**rollout, gamma=0.1), expected)


def test_two_step_returns_of_a_hand_worked_table():
    # Row 1: 1 + .1 (2 + .1 * 100) = 2.2 bootstraps from V(s_3); row 2 runs into the terminal step: 2 + .1 * 3.
    expected = torch.tensor([0.0, 2.2, 2.3, 3.0, 5.5, 15.0, 6.7, 7.0])
    torch.testing.assert_close(n_step_returns(**table(), gamma=0.1, n=2), expected)


def test_rewards_of_up_to_three_steps_of_a_hand_worked_table():
    # 1 + .5·2 + .25·4 over three steps; the second transition's episode ended after two, the third's after one.
    reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 0.0], [-3.0, 0.0, 0.0]])
    summed, discount = n_step_rewards(reward, torch.tensor([3, 2, 1]), 0.5)
    torch.testing.assert_close(summed, torch.tensor([3.0, 2.0, -3.0]))
    torch.testing.assert_close(discount, torch.tensor([0.125, 0.25, 0.5]))


@given(seeds, st.integers(1, 6))
@repeatable
def test_replayed_rewards_and_a_bootstrap_are_n_step_returns(seed, n):
    rollout = random_rollout(seed, n, 1)
    reward, ended = rollout["reward"][:, 0], (rollout["terminated"] | rollout["truncated"])[:, 0]
    counts = int(ended.nonzero()[0]) + 1 if ended.any() else n
    row = torch.where(torch.arange(n) < counts, reward, 0.0)[None]
    summed, discount = n_step_rewards(row, torch.tensor([counts]), 0.9)
    last = {name: rollout[name][counts - 1] for name in ("terminated", "next_value")}
    target = dqn_target(summed, last["terminated"], last["next_value"][:, None], discount)
    expected = n_step_returns(**{k: rollout[k] for k in ("reward", "next_value", "terminated", "truncated")},
                              gamma=0.9, n=n)[0]  # fmt: skip
    torch.testing.assert_close(target, expected)


def test_rewards_of_a_step_and_discounts_need_their_shapes():
    with pytest.raises(ValueError, match=r"reward has shape \(4,\)"):
        n_step_rewards(torch.ones(4), torch.ones(4), 0.9)
    with pytest.raises(ValueError, match=r"n_steps has shape \(3,\)"):
        n_step_rewards(torch.ones(4, 2), torch.ones(3), 0.9)
    with pytest.raises(ValueError, match="gamma"):
        n_step_rewards(torch.ones(4, 2), torch.ones(4), 1.5)


def test_gae_of_a_hand_worked_table():
    rollout = table()
    rollout["value"] = torch.full((8,), 10.0)
    # δ = r - 10 at 0, 3, 7 (terminated), else r + .1 * 100 - 10 = r. γλ = .05; sums stop at 0, 3, 5 and 7.
    expected = torch.tensor([-10.0, 1 + 0.05 * (2 - 0.35), 2 - 0.35, -7.0, 4 + 0.25, 5.0, 6 - 0.15, -3.0])
    torch.testing.assert_close(gae(**rollout, gamma=0.1, gae_lambda=0.5), expected)


def test_terminated_and_truncated_at_once_counts_as_terminated():
    both = table()
    both["truncated"] = both["truncated"] | both["terminated"]
    both["terminated"][5] = True
    only = table()
    only["terminated"][5], only["truncated"][5] = True, False
    for function in (discounted_returns, lambda **k: n_step_returns(**k, n=3)):
        torch.testing.assert_close(function(**both, gamma=0.9), function(**only, gamma=0.9))
    value = {"value": randn(0, 8, dtype=torch.float32), "gamma": 0.9, "gae_lambda": 0.8}
    torch.testing.assert_close(gae(**both, **value), gae(**only, **value))


def test_a_constant_reward_without_end_is_worth_its_geometric_series():
    # With V = r / (1 - γ) everywhere nothing is surprising: the returns are V and all advantages vanish.
    steps, gamma = 200, 0.97
    worth = torch.full((steps, 2), 1 / (1 - gamma), dtype=torch.float64)
    rollout = {
        "reward": torch.ones(steps, 2, dtype=torch.float64),
        "next_value": worth,
        "terminated": torch.zeros(steps, 2, dtype=torch.bool),
        "truncated": coins(0, 0.1, steps, 2),
    }
    torch.testing.assert_close(discounted_returns(**rollout, gamma=gamma), worth)
    torch.testing.assert_close(n_step_returns(**rollout, gamma=gamma, n=7), worth)
    advantage = gae(**rollout, value=worth, gamma=gamma, gae_lambda=0.9)
    torch.testing.assert_close(advantage, torch.zeros_like(advantage), atol=1e-12, rtol=0)


@pytest.mark.parametrize("steps", STEPS_AROUND_THE_SWITCH_TO_THE_SCAN)
def test_recurrences_equal_the_textbook_sums(steps):
    rollout = random_rollout(steps, steps, 2)
    value = rollout.pop("value")
    returns = discounted_returns(**rollout, gamma=0.95)
    three_step = n_step_returns(**rollout, gamma=0.95, n=3)
    advantage = gae(**rollout, value=value, gamma=0.95, gae_lambda=0.9)
    for t in range(steps):
        for env in range(2):
            assert returns[t, env].item() == pytest.approx(n_step_sum(rollout, t, env, 0.95, float("inf")))
            assert three_step[t, env].item() == pytest.approx(n_step_sum(rollout, t, env, 0.95, 3))
            expected = gae_sum({**rollout, "value": value}, t, env, 0.95, 0.9)
            assert advantage[t, env].item() == pytest.approx(expected, abs=1e-12)


@repeatable
@given(seeds, st.integers(1, 40), st.integers(1, 45))
def test_n_step_returns_equal_their_definition_for_every_n(seed, steps, n):
    rollout = random_rollout(seed, steps, 1)
    rollout.pop("value")
    result = n_step_returns(**rollout, gamma=0.9, n=n)
    for t in range(steps):
        assert result[t, 0].item() == pytest.approx(n_step_sum(rollout, t, 0, 0.9, n))


@repeatable
@given(seeds, st.integers(1, 80))
def test_lambda_zero_is_the_td_error_and_lambda_one_the_return_minus_the_value(seed, steps):
    rollout = random_rollout(seed, steps, 3)
    rest = {k: v for k, v in rollout.items() if k != "value"}
    one_step = n_step_returns(**rest, gamma=0.9, n=1) - rollout["value"]
    torch.testing.assert_close(gae(**rollout, gamma=0.9, gae_lambda=0.0), one_step)
    monte_carlo = discounted_returns(**rest, gamma=0.9) - rollout["value"]
    # With V(s_{t+1}) = next_value_t inside an episode the sum of TD errors telescopes; otherwise it need not.
    consistent = dict(rollout)
    goes_on = ~(rollout["terminated"] | rollout["truncated"])[:-1]
    consistent["next_value"] = rollout["next_value"].clone()
    consistent["next_value"][:-1][goes_on] = rollout["value"][1:][goes_on]
    torch.testing.assert_close(gae(**consistent, gamma=0.9, gae_lambda=1.0), monte_carlo)


@repeatable
@given(seeds, st.floats(-3, 3), st.floats(0.1, 5))
def test_scaling_rewards_and_values_scales_all_results(seed, shift, scale):
    rollout = random_rollout(seed, 30, 2)
    scaled = {k: v * scale if v.is_floating_point() else v for k, v in rollout.items()}
    torch.testing.assert_close(
        gae(**scaled, gamma=0.9, gae_lambda=0.8), gae(**rollout, gamma=0.9, gae_lambda=0.8) * scale
    )
    # A bonus c on every step of an unending task raises every value by c / (1 - γ): advantages stay.
    endless = {**rollout, "terminated": torch.zeros_like(rollout["terminated"])}
    shifted = {**endless, "reward": endless["reward"] + shift}
    for key in ("value", "next_value"):
        shifted[key] = endless[key] + shift / (1 - 0.9)
    torch.testing.assert_close(
        gae(**shifted, gamma=0.9, gae_lambda=0.8), gae(**endless, gamma=0.9, gae_lambda=0.8), atol=1e-10, rtol=0
    )


@repeatable
@given(seeds)
def test_environments_do_not_mix(seed):
    rollout = random_rollout(seed, 40, 5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    shuffled = {k: v[:, order] for k, v in rollout.items()}
    torch.testing.assert_close(
        gae(**shuffled, gamma=0.9, gae_lambda=0.8), gae(**rollout, gamma=0.9, gae_lambda=0.8)[:, order]
    )


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_nothing_after_an_end_reaches_back_before_it(kind):
    rollout = random_rollout(0, 40, 1, end=0.0)
    rollout[kind][20] = True
    changed = {k: v.clone() for k, v in rollout.items()}
    for key in ("reward", "value", "next_value"):
        changed[key][21:] += 100.0
    before = gae(**rollout, gamma=0.99, gae_lambda=0.95)
    after = gae(**changed, gamma=0.99, gae_lambda=0.95)
    torch.testing.assert_close(after[:21], before[:21])
    assert (after[21:] != before[21:]).all()


def test_the_successor_of_a_terminal_step_is_never_read():
    rollout = random_rollout(0, 40, 2)
    rollout["next_value"] = rollout["next_value"].masked_fill(rollout["terminated"], torch.nan)
    assert gae(**rollout, gamma=0.9, gae_lambda=0.9).isfinite().all()
    rollout.pop("value")
    assert discounted_returns(**rollout, gamma=0.9).isfinite().all()
    assert n_step_returns(**rollout, gamma=0.9, n=4).isfinite().all()


def test_one_environment_may_come_without_its_dimension():
    rollout = random_rollout(0, 50, 1)
    flat = {k: v[:, 0] for k, v in rollout.items()}
    torch.testing.assert_close(gae(**flat, gamma=0.9, gae_lambda=0.9), gae(**rollout, gamma=0.9, gae_lambda=0.9)[:, 0])


def test_a_long_float32_rollout_is_right_to_rounding():
    rollout = random_rollout(0, 2048, 8, dtype=torch.float32, end=0.001)
    exact = gae(**{k: v.double() if v.is_floating_point() else v for k, v in rollout.items()}, gamma=1, gae_lambda=1)
    # About 1,000 terms of size 1 add up to 30-100; float32 carries 1e-7 of that, times the root of their number.
    torch.testing.assert_close(gae(**rollout, gamma=1, gae_lambda=1).double(), exact, atol=1e-4, rtol=0)


def test_bfloat16_rollouts_are_summed_in_float32():
    steps = 600
    ones = torch.ones(steps, 1, dtype=torch.bfloat16)
    none = torch.zeros(steps, 1, dtype=torch.bool)
    result = discounted_returns(ones, ones * 0, none, none, gamma=1.0)
    # A bfloat16 sum of ones gets stuck at 256.
    assert result.dtype is torch.float32
    assert result[0].item() == steps


def test_flags_may_be_numbers():
    rollout = random_rollout(0, 20, 2)
    floats = {k: v.double() if v.dtype is torch.bool else v for k, v in rollout.items()}
    torch.testing.assert_close(
        gae(**floats, gamma=0.9, gae_lambda=0.9), gae(**rollout, gamma=0.9, gae_lambda=0.9), rtol=0, atol=0
    )


def test_results_are_constants_and_inputs_stay_as_they_are():
    rollout = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in random_rollout(0, 40, 2).items()}
    copies = {k: v.detach().clone() for k, v in rollout.items()}
    assert not gae(**rollout, gamma=0.9, gae_lambda=0.9).requires_grad
    value = rollout.pop("value")
    assert not discounted_returns(**rollout, gamma=0.9).requires_grad
    assert not n_step_returns(**rollout, gamma=0.9, n=3).requires_grad
    for name, tensor in {**rollout, "value": value}.items():
        assert torch.equal(tensor, copies[name]), name


@pytest.mark.parametrize("steps", [0, 1])
def test_empty_and_single_step_rollouts(steps):
    rollout = random_rollout(0, steps, 2)
    assert gae(**rollout, gamma=0.9, gae_lambda=0.9).shape == (steps, 2)
    rollout.pop("value")
    assert discounted_returns(**rollout, gamma=0.9).shape == (steps, 2)
    assert n_step_returns(**rollout, gamma=0.9, n=2).shape == (steps, 2)


@pytest.mark.parametrize("name", ["value", "next_value", "terminated", "truncated"])
def test_a_wrong_shape_is_refused_by_name(name):
    rollout = random_rollout(0, 6, 4)
    rollout[name] = rollout[name][:, :1]
    with pytest.raises(ValueError, match=rf"^{name} has shape \(6, 1\), expected \(6, 4\)"):
        gae(**rollout, gamma=0.9, gae_lambda=0.9)
    if name != "value":
        rollout.pop("value")
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            discounted_returns(**rollout, gamma=0.9)
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            n_step_returns(**rollout, gamma=0.9, n=2)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_numbers_outside_their_range_are_refused_by_name(bad):
    rollout = random_rollout(0, 6, 4)
    with pytest.raises(ValueError, match="gamma"):
        gae(**rollout, gamma=bad, gae_lambda=0.9)
    with pytest.raises(ValueError, match="gae_lambda"):
        gae(**rollout, gamma=0.9, gae_lambda=bad)
    rollout.pop("value")
    with pytest.raises(ValueError, match="gamma"):
        discounted_returns(**rollout, gamma=bad)
    with pytest.raises(ValueError, match="gamma"):
        n_step_returns(**rollout, gamma=bad, n=2)
    with pytest.raises(ValueError, match="n must be at least 1"):
        n_step_returns(**rollout, gamma=0.9, n=0)


def test_a_scalar_reward_is_refused():
    zero, no = torch.tensor(0.0), torch.tensor(False)
    with pytest.raises(ValueError, match="reward has no dimensions"):
        discounted_returns(zero, zero, no, no, gamma=0.9)
