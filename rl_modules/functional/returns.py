"""Returns and advantages of a rollout: what a transition turned out to be worth.

All functions here share three conventions.

* Time is the first dimension. ``[T, N]`` is the usual rollout; ``[T]`` and ``[T, N, agents]`` work the same way.
* ``next_value[t]`` is the value of the *true* successor of state t, so at a truncation that of the final
  observation, never that of the reset observation which follows it in the rollout.
* Truncation is not termination. ``terminated`` says that no reward could follow: the successor counts as 0.
  ``truncated`` says that the episode was cut off: the successor's value replaces the later rewards. No sum includes
  rewards of the next episode. If both are set, the transition counts as terminated.

Results are constants (no gradient flows through a target) in float32, or float64 where rewards or values are.
Rewards and values are finite: an infinite one reaches earlier steps of its column as infinity or NaN, those of earlier
episodes too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    require_number,
    require_same_shape,
)

# Shorter recurrences run as a plain loop: below this length its one kernel per step beats the scan's bookkeeping.
_LOOP_LENGTH = 16


def discounted_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, gamma: float
) -> Tensor:
    """Monte Carlo returns: the discounted rewards to the end of the episode, with a bootstrap if it was truncated.

    G_t = r_t                         if the episode terminated at t
    G_t = r_t + γ V(s_{t+1})          if it was truncated at t, or the rollout ends here
    G_t = r_t + γ G_{t+1}             otherwise

    Args:
        reward: r_t, shape (T, N), in units of reward.
        next_value: V(s_{t+1}) of the true successor, shape (T, N), in units of reward. Read only where an episode
            was truncated and in the last row; pass zeros to ignore rewards after the cut.
        terminated: true where s_{t+1} is terminal, shape (T, N).
        truncated: true where the episode was cut off after t, shape (T, N).
        gamma: discount γ per step, in [0, 1].

    Returns:
        G, shape (T, N), in units of reward, detached.

    Raises:
        ValueError: shapes differ, or gamma is outside [0, 1].

    Source: Sutton & Barto 2018, eq. 3.9; bootstrapping at time limits: Pardo et al. 2018, arXiv:1712.00378.
    """
    _check_rollout(gamma, reward=reward, next_value=next_value, terminated=terminated, truncated=truncated)
    reward, next_value = as_constant(reward), as_constant(next_value)
    ended = terminated.bool() | truncated.bool()
    bootstraps = ended.clone()
    bootstraps[-1:] = True
    tail = torch.where(bootstraps & ~terminated.bool(), next_value, 0.0)
    decay = torch.full_like(reward, gamma).masked_fill_(ended, 0.0)
    return _backward_recurrence(torch.add(reward, tail, alpha=gamma), decay)


def n_step_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, n: int
) -> Tensor:
    """n-step returns: n rewards and a bootstrap from the value function; fewer rewards if the episode or rollout ends.

    G_t^(1) = r_t + γ (1 - terminated_t) V(s_{t+1})
    G_t^(n) = G_t^(1)                  if the episode ended at t, or the rollout does
    G_t^(n) = r_t + γ G_{t+1}^(n-1)    otherwise

    Args:
        reward: r_t, shape (T, N), in units of reward.
        next_value: V(s_{t+1}) of the true successor, shape (T, N), in units of reward.
        terminated: true where s_{t+1} is terminal, shape (T, N).
        truncated: true where the episode was cut off after t, shape (T, N).
        gamma: discount γ per step, in [0, 1].
        n: the number of rewards to sum, in steps, at least 1. From n = T on these are ``discounted_returns``.

    Returns:
        G^(n), shape (T, N), in units of reward, detached.

    Raises:
        ValueError: shapes differ, gamma is outside [0, 1], or n is below 1.

    Source: Sutton & Barto 2018, eq. 7.1; used so by A3C, Mnih et al. 2016, arXiv:1602.01783, section 4.
    """
    _check_rollout(gamma, reward=reward, next_value=next_value, terminated=terminated, truncated=truncated)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n!r}.")
    if n >= reward.shape[0]:
        return discounted_returns(reward, next_value, terminated, truncated, gamma)
    reward, next_value = as_constant(reward), as_constant(next_value)
    one_step = torch.add(reward, torch.where(terminated.bool(), 0.0, next_value), alpha=gamma)
    goes_on = ~(terminated.bool() | truncated.bool())[:-1]
    result = one_step
    for _ in range(n - 1):
        longer = torch.add(reward[:-1], result[1:], alpha=gamma)
        result = torch.cat((torch.where(goes_on, longer, one_step[:-1]), one_step[-1:]))
    return result


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
    _check_rollout(gamma, reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated)
    require_number("gae_lambda", gae_lambda, 0.0, 1.0)
    reward, value, next_value = as_constant(reward), as_constant(value), as_constant(next_value)
    terminated = terminated.bool()
    delta = torch.add(reward - value, torch.where(terminated, 0.0, next_value), alpha=gamma)
    decay = torch.full_like(delta, gamma * gae_lambda).masked_fill_(terminated | truncated.bool(), 0.0)
    return _backward_recurrence(delta, decay)


def _check_rollout(gamma: float, **fields: Tensor) -> None:
    """Checks the range of γ, and that all fields of a rollout are tensors of the rewards' shape."""
    require_same_shape(**fields)
    if fields["reward"].ndim == 0:
        raise ValueError("reward has no dimensions, expected time first: [T] or [T, N].")
    require_number("gamma", gamma, 0.0, 1.0)


def _backward_recurrence(addend: Tensor, decay: Tensor) -> Tensor:
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
    first = _backward_recurrence(torch.addcmul(first, first_decay, second), first_decay * second_decay)
    result = torch.empty_like(addend)
    result[odd::2] = first
    result[odd + 1 : -1 : 2] = torch.addcmul(second[:-1], second_decay[:-1], first[1:])
    result[-1] = second[-1]
    if odd:
        result[0] = torch.addcmul(addend[0], decay[0], first[0])
    return result
