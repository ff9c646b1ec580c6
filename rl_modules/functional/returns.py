"""Returns of a rollout: what a transition turned out to be worth.

These functions and :func:`rl_modules.functional.gae` share three conventions.

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

from rl_modules.functional.advantages import backward_recurrence
from rl_modules.functional.checks import as_constant, require_rollout


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
    require_rollout(gamma, reward=reward, next_value=next_value, terminated=terminated, truncated=truncated)
    reward, next_value = as_constant(reward), as_constant(next_value)
    ended = terminated.bool() | truncated.bool()
    bootstraps = ended.clone()
    bootstraps[-1:] = True
    tail = torch.where(bootstraps & ~terminated.bool(), next_value, 0.0)
    decay = torch.full_like(reward, gamma).masked_fill_(ended, 0.0)
    return backward_recurrence(torch.add(reward, tail, alpha=gamma), decay)


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
    require_rollout(gamma, reward=reward, next_value=next_value, terminated=terminated, truncated=truncated)
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
