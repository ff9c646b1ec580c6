import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import dqn_target, explained_variance, td_loss, value_loss

from .helpers import coins, randn, repeatable, seeds


def test_value_loss_is_half_the_mean_squared_error():
    value, returns = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.0, 4.0, 5.0])
    assert value_loss(value, returns).item() == pytest.approx((1 + 4 + 0) / 6)
    mask = torch.tensor([1.0, 0.0, 1.0])
    assert value_loss(value, returns, mask=mask).item() == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.1, 0.0, 0.5, 1.0),  # inside the range: the plain loss
        (0.5, 1.0, 0.0, 0.5 * 0.8**2, 0.0),  # moved too far towards the target: held at 1 - .2, no gradient
        (2.0, 1.0, 0.0, 2.0, 2.0),  # moved away from it: the larger, unclipped loss
    ],
)
def test_value_clipping_keeps_the_worse_of_the_two_errors(value, old, target, loss, slope):
    prediction = torch.tensor([value], requires_grad=True)
    result = value_loss(prediction, torch.tensor([target]), torch.tensor([old]), clip_range=0.2)
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert prediction.grad.item() == pytest.approx(slope)


@repeatable
@given(seeds)
def test_a_wide_clip_range_changes_nothing(seed):
    value, returns, old = randn(seed, 30), randn(seed + 1, 30), randn(seed + 2, 30)
    torch.testing.assert_close(value_loss(value, returns, old, 100.0), value_loss(value, returns))
    mask = coins(seed, 0.5, 30)
    torch.testing.assert_close(value_loss(value, returns, old, 100.0, mask), value_loss(value, returns, mask=mask))


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_value_loss_ignores_what_stands_under_the_mask(clip_range):
    mask = coins(0, 0.5, 20)
    value, returns, old = randn(1, 20), randn(2, 20), randn(3, 20)
    old = None if clip_range is None else old
    clean = value_loss(value[mask], returns[mask], None if old is None else old[mask], clip_range)
    of_counted = torch.func.grad(value_loss)(value[mask], returns[mask], None if old is None else old[mask], clip_range)
    dirty = value.masked_fill(~mask, torch.nan).requires_grad_()
    targets = returns.masked_fill(~mask, torch.nan)
    loss = value_loss(dirty, targets, None if old is None else old.masked_fill(~mask, -torch.inf), clip_range, mask)
    loss.backward()
    torch.testing.assert_close(loss.detach(), clean)
    torch.testing.assert_close(dirty.grad, torch.zeros_like(value).masked_scatter(mask, of_counted))


def test_only_the_value_receives_gradient():
    value, returns, old = (randn(i, 8).requires_grad_() for i in range(3))
    value_loss(value, returns, old, 0.1).backward()
    assert value.grad.abs().sum() > 0
    assert returns.grad is None
    assert old.grad is None


def test_value_loss_refuses_by_name():
    row, column = torch.zeros(5), torch.zeros(5, 1)
    with pytest.raises(ValueError, match=r"^returns has shape \(5, 1\), expected \(5,\)"):
        value_loss(row, column)
    with pytest.raises(ValueError, match=r"^old_value has shape"):
        value_loss(row, row, column, 0.2)
    with pytest.raises(ValueError, match=r"^mask has shape"):
        value_loss(row, row, mask=column)
    with pytest.raises(ValueError, match=r"^clip_range"):
        value_loss(row, row, row, -1.0)
    with pytest.raises(ValueError, match=r"^old_value is None"):
        value_loss(row, row, clip_range=0.2)


def test_without_clip_range_the_old_value_has_no_part():
    value, returns, old = randn(1, 5), randn(2, 5), randn(3, 5)
    assert torch.equal(value_loss(value, returns, old), value_loss(value, returns))


def test_dqn_target_of_a_hand_worked_table():
    reward = torch.tensor([1.0, 2.0, 3.0])
    terminated = torch.tensor([False, True, False])
    target_q = torch.tensor([[1.0, 5.0], [7.0, 8.0], [2.0, 1.0]])
    torch.testing.assert_close(dqn_target(reward, terminated, target_q, 0.5), torch.tensor([3.5, 2.0, 4.0]))
    # Double DQN: the online network chooses (0, 0, 1), the target network says what that is worth.
    online_q = torch.tensor([[2.0, 1.0], [9.0, 1.0], [0.0, 3.0]])
    torch.testing.assert_close(dqn_target(reward, terminated, target_q, 0.5, online_q), torch.tensor([1.5, 2.0, 3.5]))


def test_dqn_target_takes_a_discount_per_transition():
    reward, terminated = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    target_q = torch.tensor([[1.0], [1.0], [1.0]])
    gamma = torch.tensor([0.9, 0.81, 0.729])
    torch.testing.assert_close(dqn_target(reward, terminated, target_q, gamma), gamma)


def test_dqn_target_is_constant_and_does_not_read_past_the_end():
    reward = torch.zeros(2)
    target_q = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0]], requires_grad=True)
    result = dqn_target(reward, torch.tensor([True, False]), target_q, 0.9, target_q.detach().clone().requires_grad_())
    torch.testing.assert_close(result, torch.tensor([0.0, 1.8]))
    assert not result.requires_grad


def test_dqn_target_refuses_by_name():
    row, q = torch.zeros(4), torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"^terminated has shape"):
        dqn_target(row, torch.zeros(4, 1), q, 0.9)
    with pytest.raises(ValueError, match=r"^next_q_target has shape"):
        dqn_target(row, row, torch.zeros(4), 0.9)
    with pytest.raises(ValueError, match=r"^next_q_target has shape"):
        dqn_target(row, row, torch.zeros(3, 2), 0.9)
    with pytest.raises(ValueError, match=r"^next_q_online has shape"):
        dqn_target(row, row, q, 0.9, torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"^gamma"):
        dqn_target(row, row, q, 1.5)
    with pytest.raises(ValueError, match=r"^gamma has shape"):
        dqn_target(row, row, q, torch.zeros(4, 1))


def test_td_loss_of_hand_worked_tables():
    prediction, target = torch.tensor([0.0, 0.5, 3.0]), torch.zeros(3)
    assert td_loss(prediction, target).item() == pytest.approx((0.25 + 9) / 3)
    assert td_loss(prediction, target, "huber").item() == pytest.approx((0.125 + 2.5) / 3)
    weight = torch.tensor([1.0, 2.0, 0.1])
    assert td_loss(prediction, target, "mse", weight).item() == pytest.approx((0.5 + 0.9) / 3)
    assert td_loss(prediction, target, "huber", weight).item() == pytest.approx((0.25 + 0.25) / 3)


@repeatable
@given(seeds, st.floats(0.1, 10))
def test_hubers_gradient_is_the_clipped_error(seed, scale):
    prediction = (randn(seed, 20) * scale).requires_grad_()
    target = randn(seed + 1, 20)
    td_loss(prediction, target, "huber").backward()
    torch.testing.assert_close(prediction.grad, (prediction - target).detach().clamp(-1, 1) / 20)


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_only_the_prediction_receives_gradient(loss):
    prediction, target, weight = (randn(i, 8).requires_grad_() for i in range(3))
    td_loss(prediction, target, loss, weight).backward()
    assert prediction.grad.abs().sum() > 0
    assert target.grad is None
    assert weight.grad is None
    prediction.grad = None
    td_loss(prediction, target, loss).backward()
    assert prediction.grad.abs().sum() > 0
    assert target.grad is None


def test_td_loss_refuses_by_name():
    row, column = torch.zeros(5), torch.zeros(5, 1)
    with pytest.raises(ValueError, match=r"^target has shape"):
        td_loss(row, column)
    with pytest.raises(ValueError, match=r"^weight has shape"):
        td_loss(row, row, weight=column)
    with pytest.raises(ValueError, match=r"^loss must be one of 'mse', 'huber', got 'l1'"):
        td_loss(row, row, "l1")


def test_explained_variance_of_known_critics():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(returns + 7, returns).item() == pytest.approx(1)
    assert explained_variance(torch.zeros(4), returns).item() == pytest.approx(0)
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4)).isnan()
    # The mean of these is rounded, in float32.
    assert explained_variance(torch.randn(997), torch.full((997,), 99.1)).isnan()
    with pytest.raises(ValueError, match=r"^returns has shape"):
        explained_variance(returns, returns[:, None])


@pytest.mark.filterwarnings("error")
def test_nothing_has_no_explained_variance():
    assert explained_variance(torch.empty(0), torch.empty(0)).isnan()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_float32(half):
    value, zero = torch.full((1000,), 1.0, dtype=half), torch.zeros(1000, dtype=half)
    for loss in (value_loss(value, zero) * 2, td_loss(value, zero), value_loss(value, zero, mask=zero + 1) * 2):
        assert loss.dtype is torch.float32
        assert loss.item() == 1.0
    assert dqn_target(zero, zero, value.unsqueeze(-1), 1.0).dtype is torch.float32


def test_targets_of_another_precision_do_not_break_the_backward_pass():
    prediction = torch.zeros(4, requires_grad=True)
    target = torch.ones(4, dtype=torch.float64)
    for loss in (value_loss(prediction, target), td_loss(prediction, target), td_loss(prediction, target, "huber")):
        loss.backward()
    assert prediction.grad.isfinite().all()
