"""Optimizers beside torch's, and the default Adam."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.fast import is_fast
from rl_modules.fast.adam import FusedAdam, fast_clip_grad_norm


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
        if not lr >= 0:
            raise UsageError(f"lr={lr} must not be negative")
        if not 0 <= alpha < 1:
            raise UsageError(f"alpha={alpha} must lie in [0, 1)")
        if not eps > 0:
            raise UsageError(f"eps={eps} must be positive")
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, all parameters of a group at once.

        Args:
            closure: computes the gradients anew and returns the loss.

        Returns:
            What the closure returned.
        """
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


def class_names(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """The classes of optimizers by which their states can be exchanged: :class:`FusedAdam` counts as ``Adam``."""
    return ["Adam" if isinstance(o, FusedAdam) else type(o).__name__ for o in optimizers]


def adam(parameters: Iterable, lr: float, eps: float, fused: bool = True) -> torch.optim.Optimizer:
    """Returns Adam; fused except under mixed precision, where Lightning refuses to clip gradients."""
    if fused and is_fast():
        return FusedAdam(parameters, lr=lr, eps=eps)
    return torch.optim.Adam(parameters, lr=lr, eps=eps, fused=fused)


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor | None:
    """Scales gradients in place so that their global norm is at most ``max_norm``; returns the norm before, or None
    where nothing has a gradient.
    """
    if is_fast():
        return fast_clip_grad_norm(parameters, max_norm)
    with_gradients = [p for p in parameters if p.grad is not None]
    return torch.nn.utils.clip_grad_norm_(with_gradients, max_norm) if with_gradients else None
