"""Exact solutions of small, known Markov decision processes: the answers that sampled methods are tested against.

An MDP is a pair of tensors, ``transition[s, a, s'] = P(s'|s, a)`` and ``reward[s, a]``. The end of an episode is an
absorbing state: every action leads back to it, with reward 0. These functions look at the contents of their
arguments and iterate until converged, so unlike the rest of this package they are not for compiled graphs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    require_count,
    require_ndim,
    require_number,
    require_positive,
    require_same_shape,
    require_shape,
)

# Undiscounted problems have no a-priori bound on the number of sweeps; one that needs more than this never ends.
_MAX_UNDISCOUNTED_SWEEPS = 100_000


def policy_evaluation(transition: Tensor, reward: Tensor, policy: Tensor, gamma: float) -> Tensor:
    """The value of a policy in a known MDP, by solving Bellman's linear equations.

    V = r_π + γ P_π V,   r_π(s) = Σ_a π(a|s) r(s, a),   P_π(s, s') = Σ_a π(a|s) P(s'|s, a)

    Without discount (γ = 1), every state must reach an absorbing state with reward 0 (and value 0), because other
    values are infinite.

    Args:
        transition: P(s'|s, a), shape (S, A, S); rows sum to 1.
        reward: expected r(s, a), shape (S, A), in units of reward.
        policy: π(a|s), shape (S, A); rows sum to 1.
        gamma: discount γ per step, in [0, 1].

    Returns:
        V, shape (S,), in units of reward, detached; float64 if an input is, else float32.

    Raises:
        ValueError: shapes do not fit, a row is no distribution, gamma is outside [0, 1], or it is 1 and some state does
            not terminate under this policy.

    Source: Sutton & Barto 2018, eq. 4.4, solved directly.
    """
    _check_mdp(transition, reward, gamma)
    require_same_shape(reward=reward, policy=policy)
    _check_distribution("policy", policy)
    result_dtype = _result_dtype(transition, reward, policy)
    transition, reward, policy = _widen(transition), _widen(reward), _widen(policy)
    state_transition = torch.einsum("sa,sat->st", policy, transition)
    state_reward = (policy * reward).sum(-1)
    identity = torch.eye(len(state_reward), dtype=transition.dtype, device=transition.device)
    system = identity - gamma * state_transition
    if gamma == 1.0:
        # Asked for as "no way out", which is exact; P(s|s) is 1 only up to rounding.
        ends = ((state_transition * (1 - identity)) == 0).all(-1) & (state_reward == 0)
        _check_all_end(state_transition, ends)
        # V = 0 replaces the equation of an end, V = V, which would make the system singular.
        system = torch.where(ends[:, None], identity, system)
    return torch.linalg.solve(system, state_reward).to(result_dtype)


def value_iteration(transition: Tensor, reward: Tensor, gamma: float, tolerance: float = 1e-8) -> Tensor:
    """The optimal action values of a known MDP, by iterating Bellman's optimality equation.

    Q ← r(s, a) + γ Σ_s' P(s'|s, a) max_a' Q(s', a')

    Each sweep shrinks the error by γ, so a last change of c leaves an error of at most c γ / (1 - γ), which must be
    below the tolerance. Without discount (γ = 1) there is no such bound, and the change itself must be below the
    tolerance.

    Args:
        transition: P(s'|s, a), shape (S, A, S); rows sum to 1.
        reward: expected r(s, a), shape (S, A), in units of reward.
        gamma: discount γ per step, in [0, 1]; with 1 the best policy must reach an absorbing state without reward.
        tolerance: the largest error allowed in any entry, in units of reward, above 0. Rounding limits it to about
            1e-16 of the largest value, divided by 1 - γ.

    Returns:
        Q*, shape (S, A), in units of reward, detached; float64 if an input is, else float32.

    Raises:
        ValueError: shapes do not fit, a row is no distribution, a number is out of range, or gamma is 1 and the
            values do not converge.

    Source: Sutton & Barto 2018, eq. 4.10; the error bound: Puterman 1994, theorem 6.3.1.
    """
    _check_mdp(transition, reward, gamma)
    require_positive("tolerance", tolerance)
    result_dtype = _result_dtype(transition, reward)
    transition, reward = _widen(transition), _widen(reward)
    rounding = torch.finfo(reward.dtype).eps
    largest_change = tolerance if gamma == 1.0 else tolerance * (1 - gamma) / max(gamma, rounding)
    sweeps = _MAX_UNDISCOUNTED_SWEEPS if gamma == 1.0 else _sweeps_until_rounding(gamma, rounding)
    q = reward.clone()
    for _ in range(sweeps):
        previous, q = q, reward + gamma * (transition @ q.amax(-1))
        if (q - previous).abs().max() <= largest_change:
            return q.to(result_dtype)
    if gamma == 1.0:
        raise ValueError(
            f"gamma is 1 and the values still change by more than {tolerance} after {sweeps} sweeps; "
            "discount, or give every state a way to an absorbing state without reward."
        )
    return q.to(result_dtype)


def finite_horizon_evaluation(
    transition: Tensor, reward: Tensor, policy: Tensor, horizon: int, gamma: float = 1.0
) -> Tensor:
    """The expected return of a policy over a number of steps, as in an episode with a time limit.

    V_0 = 0,   V_k(s) = Σ_a π(a|s) [r(s, a) + γ Σ_s' P(s'|s, a) V_{k-1}(s')],   k = 1 … horizon

    Args:
        transition: P(s'|s, a), shape (S, A, S); rows sum to 1.
        reward: expected r(s, a), shape (S, A), in units of reward.
        policy: π(a|s), shape (S, A), the same at every step; rows sum to 1.
        horizon: number of steps, ≥ 0.
        gamma: discount γ per step, in [0, 1].

    Returns:
        V_horizon, shape (S,), in units of reward, detached; float64 if an input is, else float32.

    Raises:
        ValueError: shapes do not fit, a row is no distribution, or a number is out of range.

    Source: Puterman 1994, section 4.2.
    """
    _check_mdp(transition, reward, gamma)
    require_same_shape(reward=reward, policy=policy)
    _check_distribution("policy", policy)
    require_count("horizon", horizon)
    result_dtype = _result_dtype(transition, reward, policy)
    transition, reward, policy = _widen(transition), _widen(reward), _widen(policy)
    state_transition = torch.einsum("sa,sat->st", policy, transition)
    state_reward = (policy * reward).sum(-1)
    value = torch.zeros_like(state_reward)
    for _ in range(horizon):
        value = state_reward + gamma * (state_transition @ value)
    return value.to(result_dtype)


def finite_horizon_value_iteration(transition: Tensor, reward: Tensor, horizon: int, gamma: float = 1.0) -> Tensor:
    """The best expected return over a number of steps, by backward induction.

    V_0 = 0,   V_k(s) = max_a [r(s, a) + γ Σ_s' P(s'|s, a) V_{k-1}(s')],   k = 1 … horizon

    The optimal policy may depend on the time step, so a policy that sees only the state can have a lower return.

    Args:
        transition: P(s'|s, a), shape (S, A, S); rows sum to 1.
        reward: expected r(s, a), shape (S, A), in units of reward.
        horizon: number of steps, ≥ 0.
        gamma: discount γ per step, in [0, 1].

    Returns:
        V_horizon, shape (S,), in units of reward, detached; float64 if an input is, else float32.

    Raises:
        ValueError: shapes do not fit, a row is no distribution, or a number is out of range.

    Source: Puterman 1994, section 4.5.
    """
    _check_mdp(transition, reward, gamma)
    require_count("horizon", horizon)
    result_dtype = _result_dtype(transition, reward)
    transition, reward = _widen(transition), _widen(reward)
    value = torch.zeros(len(reward), dtype=reward.dtype, device=reward.device)
    for _ in range(horizon):
        value = (reward + gamma * (transition @ value)).amax(-1)
    return value.to(result_dtype)


def _sweeps_until_rounding(gamma: float, rounding: float) -> int:
    """The number of sweeps after which γ^n is below the rounding error: more of them change nothing."""
    return 2 if gamma == 0.0 else 2 + math.ceil(math.log(rounding * (1 - gamma)) / math.log(gamma))


def _check_mdp(transition: Tensor, reward: Tensor, gamma: float) -> None:
    require_ndim("reward", reward, 2, "[S, A]")
    states, actions = reward.shape
    require_shape("transition", transition, torch.Size((states, actions, states)), "[S, A, S] for reward [S, A]")
    require_number("gamma", gamma, 0.0, 1.0)
    _check_distribution("transition", transition)


def _check_distribution(name: str, probability: Tensor) -> None:
    total = _widen(probability).sum(-1)
    # float32 rows that were normalised in float32 are off by a few units of 1e-7, bfloat16 ones by up to 1e-2.
    slack = 1e-5 if probability.dtype in (torch.float32, torch.float64) else 2e-2
    wrong = ((total - 1).abs() > slack) | (probability < 0).any(-1) | total.isnan()
    if wrong.any():
        row = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}{list(row)} must be a distribution, got entries that sum to {total[row].item():.6g}"
            f" with minimum {probability[row].min().item():.6g}."
        )


def _check_all_end(state_transition: Tensor, ends: Tensor) -> None:
    """Refuse a chain in which some state has no path to an end: its undiscounted value does not exist."""
    can_end = ends
    for _ in range(len(ends)):
        grown = can_end | ((state_transition > 0) & can_end).any(-1)
        if torch.equal(grown, can_end):
            break
        can_end = grown
    if not can_end.all():
        state = int((~can_end).nonzero()[0])
        raise ValueError(
            f"gamma is 1, but under this policy state {state} never reaches an absorbing state without reward; "
            "discount, or change the policy."
        )


def _result_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32


def _widen(x: Tensor) -> Tensor:
    """Float64, because 1 / (1 - γ) multiplies rounding errors; Apple's GPUs have none, so float32 there."""
    return as_constant(x) if x.device.type == "mps" else x.detach().double()
