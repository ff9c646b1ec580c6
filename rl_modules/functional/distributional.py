"""Distributional value learning: a critic predicts the distribution of the return, not only its mean."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import (
    as_constant,
    as_float,
    require_ndim,
    require_number,
    require_same_shape,
    require_shape,
)


def quantile_huber_loss(quantiles: Tensor, target_quantiles: Tensor, weight: Tensor | None = None) -> Tensor:
    """The quantile regression loss of a critic that predicts N quantiles of the return.

    L = mean_b w_b Σ_i mean_j |τ_i - [δ_ij < 0]| H(δ_ij),   δ_ij = target_j - quantile_i,   τ_i = (i + ½) / N
    H(δ) = ½ δ² if |δ| ≤ 1 else |δ| - ½

    Args:
        quantiles: the predicted quantiles in units of reward, shape (B, N), i = 0 … N - 1. The only input that
            receives gradient.
        target_quantiles: samples or quantiles of the target distribution in units of reward, shape (B, M).
        weight: w, a plain factor such as prioritised replay's importance weights, shape (B,); None: all 1.

    Returns:
        Scalar to minimise: the mean over targets, the sum over quantiles, the mean over the batch.

    Raises:
        ValueError: shapes do not fit.

    Source: Dabney et al. 2018, arXiv:1710.10044, eq. 10 with κ = 1; Kuznetsov et al. 2020, arXiv:2005.04269, eq. 4.
        Equals sb3-contrib 2.7's function of this name.
    """
    require_ndim("quantiles", quantiles, 2, "[B, N]")
    require_ndim("target_quantiles", target_quantiles, 2, "[B, M]")
    if len(target_quantiles) != len(quantiles):
        raise ValueError(
            f"target_quantiles has shape {tuple(target_quantiles.shape)}, expected {len(quantiles)} rows, as quantiles."
        )
    quantiles, target_quantiles = as_float(quantiles), as_constant(target_quantiles)
    count = quantiles.shape[-1]
    error = target_quantiles.unsqueeze(-2) - quantiles.unsqueeze(-1)
    level = (torch.arange(count, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / count
    level = level.unsqueeze(-1)
    # H(δ) = c (δ - ½ c) with c = clip(δ, -1, 1), whose derivative by c vanishes wherever c moves: c and the weights
    # are constants to autograd, which halves the passes over B·N·M numbers.
    with torch.no_grad():
        clipped = error.clamp(-1, 1)
        slope = torch.where(error < 0, 1 - level, level) * clipped
    loss = (slope * error.sub(clipped, alpha=0.5)).mean(-1).sum(-1)
    if weight is not None:
        require_shape("weight", weight, quantiles.shape[:1], "quantiles' first dimension")
        loss = as_constant(weight) * loss
    return loss.mean()


def categorical_projection(
    reward: Tensor, terminated: Tensor, next_probability: Tensor, gamma: float | Tensor, v_min: float, v_max: float
) -> Tensor:
    """The Bellman target of C51, projected back onto the fixed support of the predicted distribution.

    z_i = v_min + i Δz,   Δz = (v_max - v_min) / (N - 1)
    (Φ T Z)_i = Σ_j [1 - |clip(r + γ (1 - terminated) z_j, v_min, v_max) - z_i| / Δz]_0^1 p_j

    Args:
        reward: r, shape (B,), in units of reward; with n-step targets the discounted sum of n rewards.
        terminated: true where s' is terminal, shape (B,). A truncated transition bootstraps, so it is False there.
        next_probability: p_j, the probabilities of the N support points at (s', a'), shape (B, N); rows sum to 1.
        gamma: the discount of s', in [0, 1]: γ, or γ**n for n steps, or a tensor of shape (B,) where n varies.
        v_min: the smallest return of the support, in units of reward.
        v_max: the largest return of the support, in units of reward, above v_min.

    Returns:
        The target probabilities, shape (B, N), detached; rows sum to 1. Their mean is r + γ E[Z] where no return
        falls outside the support. The loss is their cross-entropy with the predicted distribution.

    Raises:
        ValueError: shapes do not fit, N is below 2, gamma is a number outside [0, 1], or v_max is not above v_min.

    Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7.
    """
    require_ndim("reward", reward, 1, "[B]")
    require_same_shape(reward=reward, terminated=terminated)
    require_ndim("next_probability", next_probability, 2, "[B, N]")
    atoms = next_probability.shape[-1]
    if next_probability.shape[:-1] != reward.shape or atoms < 2:
        raise ValueError(
            f"next_probability has shape {tuple(next_probability.shape)}, expected that of reward, "
            f"{tuple(reward.shape)}, and a last dimension of at least 2 support points."
        )
    if not v_min < v_max:
        raise ValueError(f"v_max must be above v_min = {v_min!r}, got {v_max!r}.")
    if isinstance(gamma, Tensor):
        require_same_shape(reward=reward, gamma=gamma)
        gamma = gamma.detach().unsqueeze(-1)
    else:
        require_number("gamma", gamma, 0.0, 1.0)
    next_probability, reward = as_constant(next_probability), as_constant(reward)
    support = torch.linspace(v_min, v_max, atoms, dtype=next_probability.dtype, device=next_probability.device)
    step = (v_max - v_min) / (atoms - 1)
    shifted = reward.unsqueeze(-1) + gamma * torch.where(terminated.bool().unsqueeze(-1), 0.0, support)
    # Positions on the support in units of its step; a point between two neighbours is shared out among them.
    position = ((shifted - v_min) / step).clamp(0, atoms - 1)
    lower = position.floor().clamp(max=atoms - 2)
    share = position - lower
    index = lower.nan_to_num().long()  # a NaN reward is passed on as NaN, and not as a place outside of the support
    result = torch.zeros_like(next_probability)
    result = result.scatter_add(-1, index, next_probability * (1 - share).to(next_probability.dtype))
    return result.scatter_add(-1, index + 1, next_probability * share.to(next_probability.dtype))
