"""Means and whitening under a mask, for batches with padding."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_modules.functional.checks import as_float, require_same_shape


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of the elements that count.

    mean = Σ_i m_i x_i / Σ_i m_i

    Args:
        x: values in any unit, any shape S. Receives gradient where the mask is true, and exactly 0 elsewhere, even for
            values that are infinite or NaN.
        mask: true (nonzero) where an element counts, shape S.
        dim: the dimension to average over; None averages over all.

    Returns:
        The mean in the unit of x: a scalar, or shape S without ``dim``. If no element counts, the result is 0, with
        gradient 0.

    Raises:
        ValueError: the shapes differ.

    Source: the definition of a conditional mean; 0 for an empty selection is the convention of TRL's GRPO.
    """
    require_same_shape(x=x, mask=mask)
    counts = mask.bool()
    kept = torch.where(counts, as_float(x), 0.0)
    if dim is None:
        return kept.sum() / counts.sum().clamp(min=1)
    return kept.sum(dim) / counts.sum(dim).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales the elements that count to unit variance, and shifts them to mean zero unless ``shift_mean`` is false.

    y_i = (x_i - μ) / √(σ² + 1e-8)  [+ μ when the mean is not to be shifted],   σ² with n - 1 in its denominator

    Args:
        x: values in any unit, any shape S; receives gradient.
        mask: true (nonzero) where an element counts, shape S.
        shift_mean: False keeps the mean, for rewards whose sign matters.

    Returns:
        y, shape S, without unit; 0 where the mask is false.

    Raises:
        ValueError: the shapes differ.

    Source: Ziegler et al. 2019, arXiv:1909.08593 (``whiten`` in its code); Huang et al. 2024, arXiv:2403.17031,
        section 7.
    """
    require_same_shape(x=x, mask=mask)
    counts = mask.bool()
    mean = masked_mean(x, mask)
    centred = torch.where(counts, as_float(x) - mean, 0.0)
    variance = centred.square().sum() / (counts.sum() - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else torch.where(counts, whitened + mean, 0.0)


def mean_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mean over the elements that the mask counts; None: over all."""
    return x.mean() if mask is None else masked_mean(x, mask)
