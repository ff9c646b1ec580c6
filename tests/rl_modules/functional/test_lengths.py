import pytest
import torch

from rl_modules.functional import soft_overlong_punishment


def test_hand_worked_punishments():
    length = torch.tensor([1, 80, 81, 90, 100, 101, 500])
    expected = torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])
    torch.testing.assert_close(soft_overlong_punishment(length, 100, 20), expected)


def test_without_a_ramp_only_what_is_too_long_is_punished():
    result = soft_overlong_punishment(torch.tensor([99, 100, 101]), 100, 0)
    assert result.tolist() == [0.0, 0.0, -1.0]


def test_it_is_a_constant_in_float32_or_better():
    length = torch.tensor([5.0, 9.0], dtype=torch.float64, requires_grad=True)
    result = soft_overlong_punishment(length, 10, 10)
    assert not result.requires_grad and result.dtype is torch.float64
    torch.testing.assert_close(result, torch.tensor([-0.5, -0.9], dtype=torch.float64))


def test_refuses_by_name():
    with pytest.raises(ValueError, match=r"^length has shape"):
        soft_overlong_punishment(torch.ones(2, 2), 10, 2)
    with pytest.raises(ValueError, match=r"^max_completion_length must be at least 1"):
        soft_overlong_punishment(torch.ones(2), 0, 0)
    with pytest.raises(ValueError, match=r"^soft_punish_cache must lie in"):
        soft_overlong_punishment(torch.ones(2), 10, 11)
