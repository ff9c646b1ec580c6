import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import importance_weights

from .helpers import coins, randn, repeatable, seeds

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def by_hand(log_prob, sampling, mask, mode, low, high):
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    result = []
    for p, q, m in zip(log_prob.tolist(), sampling.tolist(), mask.tolist(), strict=True):
        differences = [a - b if counts else 0.0 for a, b, counts in zip(p, q, m, strict=True)]
        if mode.startswith("sequence"):
            differences = [sum(differences)] * len(differences)
        ratios = [math.exp(d) for d in differences]
        if mode.endswith("truncate"):
            result.append([min(max(r, low), high) for r in ratios])
        else:
            result.append([r if low <= r <= high else 0.0 for r in ratios])
    return torch.tensor(result, dtype=torch.float64)


def test_hand_worked_weights():
    # Ratios 4 and 1/2, their product 2.
    log_prob = torch.tensor([[math.log(4.0), math.log(0.5)]])
    zero, every = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)

    def weights(*options):
        return importance_weights(log_prob, zero, every, *options)

    torch.testing.assert_close(weights(), torch.tensor([[3.0, 0.5]]))
    torch.testing.assert_close(weights("token_mask"), torch.tensor([[0.0, 0.5]]))
    torch.testing.assert_close(weights("token_mask", 0.8, None), torch.tensor([[4.0, 0.0]]))
    torch.testing.assert_close(weights("token_truncate", 0.8, None), torch.tensor([[4.0, 0.8]]))
    torch.testing.assert_close(weights("sequence_truncate"), torch.tensor([[2.0, 2.0]]))
    torch.testing.assert_close(weights("sequence_truncate", None, 1.5), torch.tensor([[1.5, 1.5]]))
    torch.testing.assert_close(weights("sequence_mask", None, 1.5), torch.zeros(1, 2))


@repeatable
@given(seeds, st.sampled_from(MODES), st.sampled_from([None, 0.5]), st.sampled_from([None, 2.0]))
def test_against_python_numbers(seed, mode, low, high):
    log_prob, sampling, mask = randn(seed, 4, 6), randn(seed + 1, 4, 6), coins(seed, 0.6, 4, 6)
    result = importance_weights(log_prob, sampling, mask, mode, low, high)
    torch.testing.assert_close(result, by_hand(log_prob, sampling, mask, mode, low, high))


@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_have_weight_one(mode):
    log_prob = randn(0, 3, 5)
    assert (importance_weights(log_prob, log_prob.clone(), coins(0, 0.5, 3, 5), mode) == 1).all()


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_unreported_tokens_change_nothing(mode):
    log_prob, sampling, mask = randn(0, 3, 5), randn(1, 3, 5), coins(0, 0.5, 3, 5)
    expected = importance_weights(log_prob, sampling, mask, mode)
    dirty = torch.where(mask, log_prob, torch.tensor([torch.nan, torch.inf, -torch.inf, 1e9, 0.0]).double())
    torch.testing.assert_close(importance_weights(dirty, sampling, mask, mode), expected)
    # A token that the sampler did not report counts as one on which both agree.
    every = torch.ones(3, 5, dtype=torch.bool)
    unreported = sampling.clone()
    unreported[:, 2] = torch.nan
    agreed = sampling.clone()
    agreed[:, 2] = log_prob[:, 2]
    torch.testing.assert_close(
        importance_weights(log_prob, unreported, every, mode), importance_weights(log_prob, agreed, every, mode)
    )


def test_weights_are_constants():
    log_prob = randn(0, 2, 3).requires_grad_()
    assert not importance_weights(log_prob, randn(1, 2, 3), torch.ones(2, 3)).requires_grad


def test_refuses_by_name():
    grid = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^log_prob has shape"):
        importance_weights(grid[0], grid[0], grid[0])
    with pytest.raises(ValueError, match=r"^sampling_log_prob has shape"):
        importance_weights(grid, grid[:1], grid)
    with pytest.raises(ValueError, match=r"^mask has shape"):
        importance_weights(grid, grid, grid[:, :1])
    with pytest.raises(ValueError, match=r"^mode must be one of"):
        importance_weights(grid, grid, grid, "token")
    with pytest.raises(ValueError, match=r"^clip_min must not be above clip_max"):
        importance_weights(grid, grid, grid, clip_min=4.0)
