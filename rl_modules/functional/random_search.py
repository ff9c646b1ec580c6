"""The ascent direction of augmented random search."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import as_float, require_shape, require_tensors


def random_search_direction(deltas: Tensor, plus: Tensor, minus: Tensor, n_top: int | None = None) -> Tensor:
    """The direction in which augmented random search moves the weights.

    g = Σ_k (r_k⁺ - r_k⁻) δ_k / (b σ_R),   over the b perturbations with the largest max(r_k⁺, r_k⁻)

    Args:
        deltas: δ, perturbations from a standard normal distribution, shape (n, P).
        plus: r⁺, returns of the weights θ + σ δ, shape (n,).
        minus: r⁻, returns of θ - σ δ, shape (n,).
        n_top: b, at most n; None: n.

    Returns:
        g, shape (P,): a step of size α adds α g to θ. σ_R is the standard deviation of the 2b returns that are used
        (Bessel's correction; 1e-6 is added to b σ_R, as in sb3-contrib, so that equal returns give 0).

    Raises:
        ValueError: shapes differ, or n_top is not within 1 and n.

    Source: Mania et al. 2018, arXiv:1803.07055, algorithm 2, lines 6 and 7.
    """
    require_tensors(deltas=deltas)
    n = len(deltas)
    for name, tensor in (("plus", plus), ("minus", minus)):
        require_shape(name, tensor, torch.Size([n]), "deltas' rows")
    b = n if n_top is None else n_top
    if not 1 <= b <= n:
        raise ValueError(f"n_top={n_top} must lie in [1, {n}], the number of perturbations.")
    deltas, plus, minus = as_float(deltas), as_float(plus), as_float(minus)
    best = torch.maximum(plus, minus).argsort(descending=True)[:b]
    scale = b * torch.cat([plus[best], minus[best]]).std() + 1e-6
    return (plus[best] - minus[best]) @ deltas[best] / scale
