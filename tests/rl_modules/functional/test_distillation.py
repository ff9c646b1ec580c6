"""Divergences of distillation: TRL's numbers, closed forms, gradients by enumeration."""

import math

import pytest
import torch

from rl_modules.functional import distillation_advantage, generalized_jsd, grpo_loss, with_tail

STUDENT = torch.tensor([[1.0, -0.5, 0.25, 2.0], [0.0, 0.0, 3.0, -1.0]], dtype=torch.float64)
TEACHER = torch.tensor([[0.5, 1.5, -1.0, 0.0], [2.0, -2.0, 1.0, 0.5]], dtype=torch.float64)
#: TRL 1.16's `GKDTrainer.generalized_jsd_loss` of them, summed, by β and temperature.
OF_TRL = {(0.0, 1.0): 2.833861784453, (0.1, 1.0): 0.225151288752, (0.5, 1.0): 0.51305515011,
          (0.9, 1.0): 0.18026500692, (1.0, 1.0): 2.036502090709, (0.5, 2.0): 0.169506894596}  # fmt: skip


def log_probs(temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return (STUDENT / temperature).log_softmax(-1), (TEACHER / temperature).log_softmax(-1)


@pytest.mark.parametrize(("setting", "expected"), OF_TRL.items())
def test_equals_trl(setting: tuple[float, float], expected: float) -> None:
    beta, temperature = setting
    found = generalized_jsd(*log_probs(temperature), beta).sum()
    assert float(found) == pytest.approx(expected, abs=1e-7)  # TRL rounds β to float32


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_is_the_definition(beta: float) -> None:
    q, p = (x.exp() for x in log_probs())
    m = beta * p + (1 - beta) * q

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(-1)

    expected = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
    torch.testing.assert_close(generalized_jsd(*log_probs(), beta), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_excluded_tokens_count_nothing(beta: float) -> None:
    log_q, log_p = log_probs()
    nothing = torch.full((2, 1), -math.inf, dtype=torch.float64)
    more = torch.cat([STUDENT, nothing], -1).requires_grad_()
    found = generalized_jsd(more.log_softmax(-1), torch.cat([log_p, nothing], -1), beta)
    torch.testing.assert_close(found.detach(), generalized_jsd(log_q, log_p, beta), atol=1e-12, rtol=0)
    gradient = torch.autograd.grad(found.sum(), more)[0]
    assert gradient.isfinite().all() and (gradient[:, -1] == 0).all()


def test_the_tail_is_the_rest() -> None:
    log_q, log_p = log_probs()
    top = log_p.topk(2).indices
    found = with_tail(log_q.gather(-1, top)).exp()
    torch.testing.assert_close(found.sum(-1), torch.ones(2, dtype=torch.float64))
    coarse = generalized_jsd(with_tail(log_q.gather(-1, top)), with_tail(log_p.gather(-1, top)), 1.0)
    assert (coarse <= generalized_jsd(log_q, log_p, 1.0) + 1e-12).all(), "joining tokens can't raise a divergence"
    certain = with_tail(torch.tensor([[0.0, -40.0]], requires_grad=True))
    assert certain.isfinite().all() and torch.autograd.grad(certain.sum(), certain)[0].isfinite().all()


def test_the_policy_gradient_is_that_of_the_reverse_kl() -> None:
    """By enumeration of the tokens that a student may draw."""
    logits = STUDENT.clone().requires_grad_()
    log_p = TEACHER.log_softmax(-1)
    exact = torch.autograd.grad(generalized_jsd(logits.log_softmax(-1), log_p, 1.0).sum(), logits)[0]
    log_q, total = logits.log_softmax(-1), torch.zeros((), dtype=torch.float64)
    one = torch.ones((2, 1), dtype=torch.bool)
    for token in range(4):
        chosen, theirs = log_q[:, token : token + 1], log_p[:, token : token + 1]
        advantage = distillation_advantage(chosen, theirs, one)
        chance = chosen.detach().exp()
        for row in range(2):
            total = total + chance[row, 0] * grpo_loss(
                chosen[row : row + 1], chosen[row : row + 1].detach(), advantage[row : row + 1], one[:1],
                loss_type="dapo", num_items_in_batch=1,
            )  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], exact, atol=1e-12, rtol=0)


def test_refuses_other_shapes_and_a_beta_out_of_range() -> None:
    log_q, log_p = log_probs()
    with pytest.raises(ValueError, match="teacher_log_prob has shape"):
        generalized_jsd(log_q, log_p[:1])
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\], got 1.5"):
        generalized_jsd(log_q, log_p, 1.5)
