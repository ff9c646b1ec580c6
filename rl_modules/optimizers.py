"""Optimizers beside torch's."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rl_modules.common.errors import UsageError


class RMSpropTFLike(torch.optim.Optimizer):
    """RMSprop as TensorFlow computes it; A3C and OpenAI's A2C were published with it.

    v ← α v + (1 - α) g²,   θ ← θ - lr · g / √(v + eps),   v starts at 1

    torch's own adds eps outside the root and starts v at 0, so its first steps are about √(1 / (1 - α)) times longer:
    small gradients at the start then move the policy far.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, ≥ 0.
        alpha: α, decay of the running mean of squared gradients per step, in [0, 1).
        eps: added to that mean under the root, in squared units of the gradient, > 0.

    Raises:
        UsageError: a number outside its range.

    Source: Tieleman & Hinton 2012, lecture 6.5; TensorFlow 1's ``RMSPropOptimizer``; Stable-Baselines3's
        ``RMSpropTFLike``, to which this is equal.
    """

    def __init__(self, params: Iterable[Any], lr: float = 7e-4, alpha: float = 0.99, eps: float = 1e-5) -> None:
        if not (lr >= 0 and 0 <= alpha < 1 and eps > 0):
            raise UsageError(f"lr={lr} must not be negative, alpha={alpha} must lie in [0, 1), eps={eps} above 0")
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step, all parameters of a group at once; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["square_avg"] = torch.ones_like(p)
            squares = [self.state[p]["square_avg"] for p in parameters]
            torch._foreach_mul_(squares, group["alpha"])
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])
        return loss
