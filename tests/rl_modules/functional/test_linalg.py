import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_modules.functional import conjugate_gradient

from .helpers import randn, repeatable, seeds


def positive_definite(seed: int, n: int) -> torch.Tensor:
    a = randn(seed, n, n)
    return a @ a.T / n + 0.5 * torch.eye(n, dtype=torch.float64)


def test_two_steps_of_a_hand_worked_system():
    # The textbook system [[4, 1], [1, 3]] x = [1, 2] has the solution [1/11, 7/11].
    matrix, b = torch.tensor([[4.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0])
    torch.testing.assert_close(conjugate_gradient(matrix.mv, b, 2), torch.tensor([1 / 11, 7 / 11]))
    # One step: α = b·b / b·Hb = 5 / 20.
    torch.testing.assert_close(conjugate_gradient(matrix.mv, b, 1), b * 0.25)


@repeatable
@given(seeds, st.integers(1, 12))
def test_n_products_solve_n_equations(seed, n):
    matrix, b = positive_definite(seed, n), randn(seed + 1, n)
    solution = conjugate_gradient(matrix.mv, b, iterations=n, tolerance=0.0)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, b), atol=1e-6, rtol=1e-6)


def test_the_fisher_product_of_a_softmax_policy_against_its_explicit_matrix():
    # TRPO's product: the Hessian of KL(π_old || π) at π = π_old, which for logits is diag(p) - p pᵀ.
    logits = randn(0, 6).requires_grad_()
    old = logits.detach().log_softmax(-1)

    def fisher_product(vector):
        kl = (old.exp() * (old - logits.log_softmax(-1))).sum()
        (gradient,) = torch.autograd.grad(kl, logits, create_graph=True)
        (product,) = torch.autograd.grad(gradient @ vector, logits)
        return product + 0.1 * vector

    explicit = torch.diag(old.exp()) - old.exp().outer(old.exp()) + 0.1 * torch.eye(6, dtype=torch.float64)
    b = randn(1, 6)
    torch.testing.assert_close(fisher_product(b), explicit @ b)
    solution = conjugate_gradient(fisher_product, b, tolerance=1e-20)
    torch.testing.assert_close(solution, torch.linalg.solve(explicit, b))
    assert not solution.requires_grad


def test_it_stops_once_the_squared_residual_is_below_the_tolerance():
    calls = []

    def matvec(vector):
        calls.append(vector)
        return 2 * vector

    b = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(conjugate_gradient(matvec, b), b / 2)
    assert len(calls) == 1
    calls.clear()
    assert (conjugate_gradient(matvec, b * 1e-6) == 0).all()  # r·r = 5e-12 is below 1e-10 from the start
    assert not calls
    conjugate_gradient(matvec, b * 1e-6, tolerance=1e-20)
    assert len(calls) == 1


def test_zero_is_solved_by_zero():
    for tolerance in (0.0, 1e-10):
        solution = conjugate_gradient(lambda v: v, torch.zeros(3), tolerance=tolerance)
        torch.testing.assert_close(solution, torch.zeros(3))


@pytest.mark.long
def test_running_on_without_a_look_at_the_residual_changes_nothing():
    # What other devices and compiled graphs do: all iterations, the converged ones with a step of 0.
    matrix, b = positive_definite(0, 4).float(), randn(1, 4, dtype=torch.float32)

    def solve(b):
        return conjugate_gradient(matrix.mv, b, iterations=30)

    compiled = torch.compile(solve, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(b), solve(b))
    torch.testing.assert_close(compiled(torch.zeros(4)), torch.zeros(4))


def test_the_right_hand_side_stays_as_it_is_and_half_precision_is_computed_in_float32():
    b = randn(0, 5).requires_grad_()
    copy = b.detach().clone()
    assert not conjugate_gradient(lambda v: 3 * v, b).requires_grad
    assert torch.equal(b, copy)
    half = copy.bfloat16()
    seen = []
    result = conjugate_gradient(lambda v: seen.append(v.dtype) or 3 * v, half)
    assert result.dtype is torch.float32
    assert set(seen) == {torch.bfloat16}


def test_refuses_by_name():
    b = torch.zeros(3)
    with pytest.raises(ValueError, match=r"^b has shape"):
        conjugate_gradient(lambda v: v, b[:, None])
    with pytest.raises(ValueError, match=r"^iterations must be at least 1"):
        conjugate_gradient(lambda v: v, b, iterations=0)
    with pytest.raises(ValueError, match=r"^tolerance"):
        conjugate_gradient(lambda v: v, b, tolerance=-1.0)
    with pytest.raises(ValueError, match=r"^matvec returned shape"):
        conjugate_gradient(lambda v: v[:2], b + 1)
