"""Linear algebra without matrices: what TRPO needs of the Fisher matrix is only its product with a vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_modules.functional.checks import as_constant, require_ndim, require_number


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor], b: Tensor, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """Solves H x = b for a symmetric positive definite H, given only products H v.

    x_0 = 0,  r_0 = p_0 = b
    α = r·r / p·Hp,   x ← x + α p,   r' = r - α Hp,   p ← r' + (r'·r' / r·r) p

    Args:
        matvec: v ↦ H v, both of shape (n,). TRPO's is the product with the Fisher matrix, damping included.
        b: right-hand side, shape (n,).
        iterations: maximum number of products, at least 1; n products are exact up to rounding.
        tolerance: stop once the squared residual r·r is below this, in squared units of b, at least 0.

    Returns:
        x, shape (n,), detached.

    Raises:
        ValueError: b is not a vector, matvec changes the shape, or a number is out of range.

    Source: Hestenes & Stiefel 1952; in TRPO: Schulman et al. 2015, arXiv:1502.05477, appendix C.
    """
    require_ndim("b", b, 1, "[n]")
    require_number("tolerance", tolerance)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations!r}.")
    residual = as_constant(b)
    solution = torch.zeros_like(residual)
    direction = residual
    squared = residual.dot(residual)
    for _ in range(iterations):
        active = squared >= tolerance
        # A look at `active` costs nothing on a CPU. On other devices it would stall the queue, and it cannot be
        # traced: there the remaining steps run with a step length of 0.
        if not torch.compiler.is_compiling() and b.device.type == "cpu" and not active:
            break
        product = as_constant(matvec(direction.to(b.dtype)))
        if product.shape != b.shape:
            raise ValueError(f"matvec returned shape {tuple(product.shape)}, expected {tuple(b.shape)}, that of b.")
        # With r = 0 the quotient is 0 / 0, so it is `where` that decides, not a product with 0.
        step = torch.where(active & (squared > 0), squared / direction.dot(product), 0.0)
        solution = solution + step * direction
        residual = residual - step * product
        previous, squared = squared, residual.dot(residual)
        direction = torch.where(active & (previous > 0), residual + squared / previous * direction, direction)
    return solution
