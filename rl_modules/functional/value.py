"""Value losses and targets: how a critic, or a Q-network, learns what a state is worth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_modules.functional.checks import as_constant, as_float, require_number, require_same_shape
from rl_modules.functional.reductions import mean_of


def value_loss(
    value: Tensor,
    returns: Tensor,
    old_value: Tensor | None = None,
    clip_range: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Half the mean squared error of a critic, optionally clipped around its earlier prediction.

    L = ½ mean_i (V_i - R_i)²
    L = ½ mean_i max((V_i - R_i)², (V_i^clip - R_i)²),   V^clip = V_old + clip(V - V_old, -ε, ε)

    Args:
        value: V(s) in units of reward, any shape S. The only input that receives gradient.
        returns: R, the regression target in units of reward, shape S.
        old_value: V_old, the prediction when the rollout was collected, shape S; read only with clip_range.
        clip_range: ε in units of reward (so it depends on the scale of the rewards), at least 0; None: no clipping.
        mask: true where an element counts, shape S.

    Returns:
        Scalar to minimise.

    Raises:
        ValueError: shapes differ, clip_range is negative, or clip_range is given without old_value.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (L^VF); the clipped form is that of OpenAI Baselines' PPO2,
        Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    require_same_shape(value=value, returns=returns)
    if clip_range is not None and old_value is None:
        raise ValueError("old_value is None although clip_range is given; clipping is around the old value.")
    value, returns = as_float(value), as_constant(returns)
    if mask is not None:
        # What stands under the mask may be NaN, which the square's gradient would multiply by 0.
        require_same_shape(value=value, mask=mask)
        value, returns = (torch.where(mask.bool(), x, 0.0) for x in (value, returns))
    if old_value is not None and clip_range is not None:
        require_same_shape(value=value, old_value=old_value)
        require_number("clip_range", clip_range)
        old_value = as_constant(old_value)
        old_value = old_value if mask is None else torch.where(mask.bool(), old_value, 0.0)
        clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
        error = torch.max((value - returns).square(), (clipped - returns).square())
        return 0.5 * mean_of(error, mask)
    if mask is None:
        dtype = torch.promote_types(value.dtype, returns.dtype)  # torch 2.6 has no gradient of mixed ones
        return 0.5 * F.mse_loss(value.to(dtype), returns.to(dtype))
    return 0.5 * mean_of((value - returns).square(), mask)


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """The share of the returns' variance that the critic explains: 1 is perfect, 0 equals a constant.

    1 - Var(R - V) / Var(R)

    Args:
        value: V(s) in units of reward, any shape S.
        returns: R in units of reward, shape S.

    Returns:
        Scalar of at most 1 (negative: worse than a constant), detached; NaN when no returns vary.

    Raises:
        ValueError: shapes differ.

    Source: Stable-Baselines3's ``train/explained_variance``; the coefficient of determination of V + constant.
    """
    require_same_shape(value=value, returns=returns)
    value, returns = as_constant(value).flatten(), as_constant(returns).flatten()
    if not value.numel():
        return value.new_full((), torch.nan)
    # From the first one: around a rounded mean, constant returns would have a variance, by which is divided.
    total = (returns - returns[:1]).var(correction=0)
    # 0 / 0 is already NaN; the case to catch is a critic that is wrong about constant returns, -inf otherwise.
    return torch.where(total == 0, torch.nan, 1 - (returns - value).var(correction=0) / total)
