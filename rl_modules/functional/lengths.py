"""Rewards that depend on an answer's length alone."""

from __future__ import annotations

from torch import Tensor

from rl_modules.functional.checks import as_float, require_tensors


def soft_overlong_punishment(length: Tensor, max_completion_length: int, soft_punish_cache: int) -> Tensor:
    """DAPO's soft penalty on long answers: 0, then a linear ramp, then -1.

    R(y) = 0                                          |y| ≤ L_max - L_cache
    R(y) = ((L_max - L_cache) - |y|) / L_cache        L_max - L_cache < |y| ≤ L_max
    R(y) = -1                                         L_max < |y|

    Args:
        length: |y|, the number of tokens of each answer, shape (B,).
        max_completion_length: L_max in tokens, at least 1.
        soft_punish_cache: L_cache, the width of the ramp in tokens, from 0 (no ramp) to max_completion_length.

    Returns:
        R, shape (B,), in units of reward, in [-1, 0], detached.

    Raises:
        ValueError: length is not one-dimensional, or a number of tokens is out of range.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13. Equals TRL 1.16's ``get_soft_overlong_punishment``.
    """
    require_tensors(length=length)
    if length.ndim != 1:
        raise ValueError(f"length has shape {tuple(length.shape)}, expected 1 dimension [B].")
    if max_completion_length < 1:
        raise ValueError(f"max_completion_length must be at least 1 token, got {max_completion_length!r}.")
    if not 0 <= soft_punish_cache <= max_completion_length:
        raise ValueError(
            f"soft_punish_cache must lie in [0, {max_completion_length}] (max_completion_length), "
            f"got {soft_punish_cache!r}."
        )
    excess = as_float(length.detach()) - (max_completion_length - soft_punish_cache)
    if soft_punish_cache == 0:
        return -(excess > 0).to(excess.dtype)
    return -(excess / soft_punish_cache).clamp(0.0, 1.0)
