"""Advantages of a rollout, with the conventions of :mod:`rl_modules.functional.returns`, and the recurrence of both."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, require_number, require_rollout

# Shorter recurrences run as a plain loop: below this length its one kernel per step beats the scan's bookkeeping.
_LOOP_LENGTH = 16


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimation: an average of all n-step advantages, weighted by powers of λ.

    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = δ_t + γ λ (1 - terminated_t)(1 - truncated_t) A_{t+1},    A_T = 0

    The returns to which a critic is fitted are ``A + value`` (the λ-returns).

    Args:
        reward: r_t, shape (T, N), in units of reward.
        value: V(s_t), shape (T, N), in units of reward.
        next_value: V(s_{t+1}) of the true successor, shape (T, N), in units of reward.
        terminated: true where s_{t+1} is terminal, shape (T, N).
        truncated: true where the episode was cut off after t, shape (T, N).
        gamma: discount γ per step, in [0, 1].
        gae_lambda: λ in [0, 1]; 0 gives the TD error δ, 1 the discounted return minus the value.

    Returns:
        A, shape (T, N), in units of reward, detached.

    Raises:
        ValueError: shapes differ, or gamma or gae_lambda is outside [0, 1].

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    require_rollout(
        gamma, reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated
    )
    require_number("gae_lambda", gae_lambda, 0.0, 1.0)
    reward, value, next_value = as_constant(reward), as_constant(value), as_constant(next_value)
    terminated = terminated.bool()
    delta = torch.add(reward - value, torch.where(terminated, 0.0, next_value), alpha=gamma)
    decay = torch.full_like(delta, gamma * gae_lambda).masked_fill_(terminated | truncated.bool(), 0.0)
    return backward_recurrence(delta, decay)


def backward_recurrence(addend: Tensor, decay: Tensor) -> Tensor:
    """Solve x_t = addend_t + decay_t x_{t+1} with x_T = 0, for all t.

    A short recurrence is a loop, one kernel per step. A long one is halved first: with x_{t+1} put in, every
    second element obeys a recurrence of the same form,

        x_t = (addend_t + decay_t addend_{t+1}) + (decay_t decay_{t+1}) x_{t+2},

    and the others follow from their neighbours. That is a parallel scan: about 6 log2(T) kernels instead of T, and
    no divisions, so a decay of 0 at the end of an episode is exact for finite numbers, and nothing overflows.

    Source: Blelloch 1990, "Prefix sums and their applications", section 1.4 (first-order recurrences).
    """
    length = addend.shape[0]
    if length <= _LOOP_LENGTH:
        rows, factors = list(addend.unbind()), decay.unbind()
        for t in range(length - 2, -1, -1):
            rows[t] = torch.addcmul(rows[t], factors[t], rows[t + 1])
        return torch.stack(rows) if rows else addend
    odd = length % 2
    # Pairs are counted from the end, so the first row is the one left over when the length is odd.
    first, second = addend[odd::2], addend[odd + 1 :: 2]
    first_decay, second_decay = decay[odd::2], decay[odd + 1 :: 2]
    first = backward_recurrence(torch.addcmul(first, first_decay, second), first_decay * second_decay)
    result = torch.empty_like(addend)
    result[odd::2] = first
    result[odd + 1 : -1 : 2] = torch.addcmul(second[:-1], second_decay[:-1], first[1:])
    result[-1] = second[-1]
    if odd:
        result[0] = torch.addcmul(addend[0], decay[0], first[0])
    return result
