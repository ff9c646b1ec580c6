import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import masked_mean, masked_whiten

from .helpers import coins, randn, repeatable, seeds


def test_masked_mean_of_a_hand_worked_table():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 1]])
    assert masked_mean(x, mask).item() == 3.0
    torch.testing.assert_close(masked_mean(x, mask, dim=1), torch.tensor([1.5, 6.0]))
    torch.testing.assert_close(masked_mean(x, mask.bool(), dim=0), torch.tensor([1.0, 2.0, 6.0]))


def test_where_nothing_counts_the_mean_is_zero_with_gradient_zero():
    x = randn(0, 2, 3).requires_grad_()
    mask = torch.tensor([[True, False, True], [False, False, False]])
    result = masked_mean(x, mask, dim=1)
    assert result[1].item() == 0
    assert masked_mean(x, torch.zeros(2, 3)).item() == 0
    result.sum().backward()
    torch.testing.assert_close(x.grad, mask.double() / 2)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_what_is_masked_may_be_anything(garbage):
    mask = coins(0, 0.5, 4, 5)
    x = randn(1, 4, 5)
    dirty = x.masked_fill(~mask, garbage).requires_grad_()
    torch.testing.assert_close(masked_mean(dirty, mask).detach(), x[mask].mean())
    for function in (masked_mean, masked_whiten):
        (gradient,) = torch.autograd.grad(function(dirty, mask).square().sum(), dirty)
        assert gradient[mask].isfinite().all()
        assert (gradient[~mask] == 0).all()


@repeatable
@given(seeds, st.floats(-50, 50), st.floats(0.1, 20))
def test_whitening_removes_shift_and_scale(seed, shift, scale):
    mask = coins(seed, 0.6, 6, 5)
    mask[0, :2] = True
    x = randn(seed, 6, 5)
    white = masked_whiten(x, mask)
    torch.testing.assert_close(white[mask].mean().item(), 0.0, atol=1e-9, rtol=0)
    torch.testing.assert_close(white[mask].std().item(), 1.0, atol=1e-6, rtol=0)
    assert (white[~mask] == 0).all()
    # 1e-8 under the root leaves a trace of the scale.
    torch.testing.assert_close(masked_whiten(x * scale + shift, mask), white, atol=1e-5, rtol=0)


def test_whitening_may_leave_the_mean():
    x, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    root = 2**0.5
    expected = torch.tensor([2 - 1 / root, 2 + 1 / root, 0.0])
    torch.testing.assert_close(masked_whiten(x, mask, shift_mean=False), expected)
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([-1 / root, 1 / root, 0.0]))


def test_whitening_one_element_or_none_gives_zero():
    x = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(masked_whiten(x, torch.tensor([True, False])), torch.zeros(2))
    torch.testing.assert_close(masked_whiten(x, torch.zeros(2)), torch.zeros(2))


def test_bfloat16_is_summed_in_float32():
    x = torch.ones(1000, dtype=torch.bfloat16)
    assert masked_mean(x, x).item() == 1.0
    assert masked_mean(x, x).dtype is torch.float32
    assert masked_whiten(x, x).dtype is torch.float32


def test_a_mask_of_another_shape_is_refused():
    for function in (masked_mean, masked_whiten):
        with pytest.raises(ValueError, match=r"^mask has shape \(5, 1\), expected \(5,\)"):
            function(torch.zeros(5), torch.ones(5, 1))
