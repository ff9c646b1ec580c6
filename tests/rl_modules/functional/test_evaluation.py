import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import cons_at_k, pass_at_k

from .helpers import repeatable


def test_pass_at_k_of_hand_worked_counts():
    # 5 samples, 2 right: k = 1 gives 2/5, k = 2 gives 1 - (3·2)/(5·4), from k = 4 on a right one is sure.
    for k, expected in [(1, 0.4), (2, 0.7), (3, 0.9), (4, 1.0), (5, 1.0)]:
        assert pass_at_k(5, 2, k).item() == pytest.approx(expected)
    result = pass_at_k(torch.tensor([5, 5, 5]), torch.tensor([0, 2, 5]), 2)
    torch.testing.assert_close(result, torch.tensor([0.0, 0.7, 1.0]))


@repeatable
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    marks = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(marks, k))
    assert pass_at_k(n, c, k).item() == pytest.approx(sum(max(s) for s in subsets) / len(subsets), abs=1e-7)


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 1, 100), (1_000_000, 3, 10), (2_000, 1_000, 1_000), (10**9, 1, 1)])
def test_pass_at_k_is_stable_for_large_n(n, c, k):
    exact = 1.0 if n - c < k else float(1 - math.prod(1 - c / (n - j) for j in range(k)))
    if n == 10**9:
        exact = 1e-9  # which 1 - (1 - 1e-9) in float32 would round to 0
    assert pass_at_k(n, c, k).item() == pytest.approx(exact, rel=1e-5)


def test_pass_at_k_is_unbiased():
    # Average over the number of right answers in n = 6 draws with p = .3: the chance that 2 draws hold a right one.
    p, n, k = 0.3, 6, 2
    weight = torch.tensor([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    estimate = pass_at_k(torch.full((n + 1,), n), torch.arange(n + 1), k)
    assert (weight * estimate).sum().item() == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_refuses_by_name():
    with pytest.raises(ValueError, match=r"^k must be at least 1"):
        pass_at_k(5, 2, 0)
    with pytest.raises(ValueError, match=r"^k must be at most num_samples, got k = 6 with 5 samples"):
        pass_at_k(torch.tensor([9, 5]), torch.tensor([1, 1]), 6)
    with pytest.raises(ValueError, match=r"^num_correct must lie between 0 and num_samples"):
        pass_at_k(5, 6, 2)
    with pytest.raises(ValueError, match=r"^num_correct has shape"):
        pass_at_k(torch.tensor([5, 5]), torch.tensor([1]), 2)


def test_the_majority_of_the_first_k_answers_decides():
    answers = torch.tensor([[4, 7, 7, 4, 4], [1, 2, 3, 3, 2], [5, 5, 5, 5, 5]])
    reference = torch.tensor([4, 3, 6])
    # k = 3: 7 wins row 0. k = 5: 4 does; row 1 ties between 2 and 3, and 2 was seen first.
    assert cons_at_k(answers, reference, 3).tolist() == [0, 0, 0]
    assert cons_at_k(answers, reference, 5).tolist() == [1, 0, 0]
    assert cons_at_k(answers, torch.tensor([4, 2, 5]), 5).tolist() == [1, 1, 1]
    assert cons_at_k(answers, reference, 1).tolist() == [1, 0, 0]


def test_answers_may_be_words_and_missing():
    answers = [["8", None, "8", "9"], [None, None, None, "9"], ["a", "b", "b", "a"], [None] * 4]
    assert cons_at_k(answers, ["8", "9", "a", "c"], 4).tolist() == [1, 1, 1, 0]
    assert cons_at_k(answers, ["8", "9", "b", None], 4).tolist() == [1, 1, 0, 0]
    nan = float("nan")
    numbers = torch.tensor([[nan, nan, 2.0], [nan, nan, nan]])
    assert cons_at_k(numbers, torch.tensor([2.0, nan]), 3).tolist() == [1, 0]
    assert cons_at_k([[nan, nan, 2.0]], [2.0], 3).tolist() == [1]


def test_one_vote_is_plain_accuracy_and_negative_numbers_are_answers():
    answers = torch.tensor([[-3], [-1]])
    result = cons_at_k(answers, torch.tensor([-3, 1]), 1)
    assert result.tolist() == [1, 0]
    assert result.dtype is torch.float32


def test_cons_at_k_refuses_by_name():
    answers = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^k must be at least 1"):
        cons_at_k(answers, torch.zeros(2), 0)
    with pytest.raises(ValueError, match=r"^k must be at most the number of answers"):
        cons_at_k(answers, torch.zeros(2), 4)
    with pytest.raises(ValueError, match=r"^k must be at most the number of answers"):
        cons_at_k([["a", "b"], ["a"]], ["a", "a"], 2)
    with pytest.raises(ValueError, match=r"^reference has shape"):
        cons_at_k(answers, torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"^reference has 1 elements, expected 2"):
        cons_at_k([["a"], ["b"]], ["a"], 1)
    with pytest.raises(ValueError, match=r"^answers has shape"):
        cons_at_k(torch.zeros(3), torch.zeros(3), 1)
