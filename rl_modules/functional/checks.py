"""Checks and conversions that every function of this package makes before any arithmetic, and the mean after it.

They look at shapes, dtypes and Python numbers only, never at a tensor's contents: reading a value off a GPU
would stall it, and would break a graph under ``torch.compile``.
"""

from __future__ import annotations

import math
from numbers import Integral

import torch
from torch import Tensor


def require_tensors(**named: object) -> None:
    """Refuses an argument that is not a tensor, and names it."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}; torch.as_tensor converts it.")


def require_shape(name: str, tensor: Tensor, expected: torch.Size, like: str) -> None:
    """Refuses a tensor that would broadcast silently, such as (B, 1) against (B,)."""
    if not isinstance(tensor, Tensor):
        require_tensors(**{name: tensor})
    if tensor.shape != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}, the shape of {like}.")


def require_same_shape(**named: Tensor) -> None:
    """Refuses what is no tensor, or has another shape than the first: (B, 1) would broadcast silently against (B,)."""
    first, tensor = next(iter(named.items()))
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.shape != tensor.shape:
            require_tensors(**{name: value})
            require_shape(name, value, tensor.shape, first)


def require_ndim(name: str, tensor: Tensor, ndim: int, layout: str) -> None:
    """Refuses a tensor with another number of dimensions than ``ndim``; ``layout`` spells them out, as in "[B, L]"."""
    if not isinstance(tensor, Tensor):
        require_tensors(**{name: tensor})
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {ndim} dimensions {layout}.")


def require_number(name: str, value: float, least: float = 0.0, most: float = math.inf) -> None:
    """Refuses a number outside the closed interval [least, most], infinity and NaN."""
    if isinstance(value, str) or not (least <= value <= most and value < math.inf):
        bounds = f"be a finite number of at least {least:g}" if most == math.inf else f"lie in [{least}, {most}]"
        raise ValueError(f"{name} must {bounds}, got {value!r}.")


def require_rollout(gamma: float, **fields: Tensor) -> None:
    """Refuses a γ outside [0, 1], and fields of a rollout that are no tensors of the rewards' shape."""
    require_same_shape(**fields)
    if fields["reward"].ndim == 0:
        raise ValueError("reward has no dimensions, expected time first: [T] or [T, N].")
    require_number("gamma", gamma, 0.0, 1.0)


def require_positive(name: str, value: float) -> None:
    """Refuses zero, a negative number, infinity and NaN."""
    if isinstance(value, str) or not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def require_count(name: str, value: int) -> None:
    """Refuses what is no whole number of at least 0."""
    if not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}.")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a word that is not among ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def as_float(x: Tensor) -> Tensor:
    """Returns ``x`` in float32, or float64 as it is, because sums over bfloat16 lose small terms."""
    return x if x.dtype is torch.float32 or x.dtype is torch.float64 else x.float()


def as_constant(x: Tensor) -> Tensor:
    """Returns ``as_float(x)`` detached from the graph, for targets, advantages and other policies' log-probs."""
    # Asking first is cheaper than an unconditional detach(), and these are called for every minibatch.
    return as_float(x.detach() if x.requires_grad else x)


#: The largest numbers whose exponentials are finite.
_LARGEST_EXPONENTS = {torch.float32: 88.72283, torch.float64: 709.782712893384}


def bounded(exponent: Tensor) -> Tensor:
    """Returns ``exponent`` where its exponential is finite, else the largest such number, with a gradient of 0.

    In the backward pass a clipped loss multiplies the exponential by 0, and 0 * inf is NaN.
    """
    return exponent.clamp(max=_LARGEST_EXPONENTS[exponent.dtype])
