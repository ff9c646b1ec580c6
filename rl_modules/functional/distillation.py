"""Losses of distillation: divergences between a student's and a teacher's distribution of each token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, as_float, require_same_shape, require_tensors

#: In place of log 0, so that 0 · log 0 is 0 in value and in gradient.
_NEVER = -1e4


def generalized_jsd(log_prob: Tensor, teacher_log_prob: Tensor, beta: float = 0.5) -> Tensor:
    """The generalized Jensen–Shannon divergence between teacher p and student q, per distribution.

    D = β KL(p ‖ m) + (1 - β) KL(q ‖ m),   m = β p + (1 - β) q          0 < β < 1
    D = KL(p ‖ q)                                                       β = 0, forward KL
    D = KL(q ‖ p)                                                       β = 1, reverse KL

    Args:
        log_prob: log q in nats, shape (..., V); -inf for excluded tokens. The only input that receives gradient.
        teacher_log_prob: log p, likewise.
        beta: β, in [0, 1].

    Returns:
        D in nats, at least 0, shape (...). The forward KL is infinite in the limit where q excludes a token of p; here
        it is finite, by log q ≥ -1e4.

    Raises:
        ValueError: shapes differ, or beta is out of range.

    Source: Agarwal et al. 2024, arXiv:2306.13649, eq. 1. Equals TRL 1.16's ``generalized_jsd_loss``, which at β = 0
        and 1 has the KLs too, not the limits 0 of the equation.
    """
    require_same_shape(log_prob=log_prob, teacher_log_prob=teacher_log_prob)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta!r}.")
    log_q, log_p = as_float(log_prob).clamp(min=_NEVER), as_constant(teacher_log_prob).clamp(min=_NEVER)
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    mixture = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, mixture) + (1 - beta) * _kl(log_q, mixture)


def with_tail(log_prob: Tensor) -> Tensor:
    """Adds the probability of all other tokens to those of some tokens.

    Args:
        log_prob: log-probabilities of k different tokens in nats, shape (..., k); receives gradient.

    Returns:
        Shape (..., k + 1), the last one log(1 - Σ p), at least log 1e-7.

    Raises:
        ValueError: log_prob is no tensor.

    Source: TRL 1.16's ``loss_add_tail``.
    """
    require_tensors(log_prob=log_prob)
    total = as_float(log_prob).logsumexp(-1, keepdim=True)
    # Rounding may bring the sum to 1 or above; the gradient of log(1 - Σ p) has no bound there.
    rest = -torch.expm1(total.clamp(max=math.log1p(-1e-7)))
    return torch.cat([as_float(log_prob), rest.log()], -1)


def distillation_advantage(log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor) -> Tensor:
    """The reward of each token in on-policy distillation by policy gradient: the teacher's log-ratio.

    A_t = log p(y_t) - log q(y_t)

    The expectation of A_t ∇ log q(y_t) over y_t ~ q is minus the gradient of the token's reverse KL(q ‖ p).

    Args:
        log_prob: log q(y_t) of the student that sampled, in nats, shape (B, L).
        teacher_log_prob: log p(y_t), shape (B, L).
        mask: true where a token counts, shape (B, L).

    Returns:
        A in nats, detached, shape (B, L); 0 outside the mask.

    Raises:
        ValueError: shapes differ.

    Source: Lu et al. 2025, "On-policy distillation" (Thinking Machines Lab), with discount 0; Gu et al. 2024,
        arXiv:2306.08543.
    """
    require_same_shape(log_prob=log_prob, teacher_log_prob=teacher_log_prob, mask=mask)
    return torch.where(mask.bool(), as_constant(teacher_log_prob) - as_constant(log_prob), 0.0)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) over the last dimension."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
