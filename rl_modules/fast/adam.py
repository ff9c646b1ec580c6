"""Adam and gradient clipping for small networks.

torch's own are general: they sort parameters by device and dtype at every step and open a profiler's scope. For a
network of a few layers that takes as long as the arithmetic; ``python -m benchmarks.optimizers`` measures the cost.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import optimizer as base

from rl_modules.fast import is_fast, is_recording

if TYPE_CHECKING:
    from rl_modules.base import ControlModule


def _scope_where_watched(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``step`` that opens torch's profiler scope only while a profiler runs, or there are hooks."""
    wrapped = torch.optim.Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        is_watched = (
            torch.autograd.profiler._is_profiler_enabled
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or base._global_optimizer_pre_hooks
            or base._global_optimizer_post_hooks
        )
        return (wrapped if is_watched else func)(self, closure)

    return step


@_disable_dynamo
def _fused_adam(*lists: Any, **settings: Any) -> None:
    """``torch._fused_adam_`` outside of compiled graphs, in which torch's functionalization fails on it."""
    torch._fused_adam_(*lists, **settings)


class FusedAdam(torch.optim.Adam):
    """``torch.optim.Adam(..., fused=True)`` for small networks on one device, without sorting: equal bit for bit."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, eps: float = 1e-8) -> None:
        super().__init__(params, lr=lr, eps=eps, fused=True)

    profile_hook_step = staticmethod(_scope_where_watched)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the step before, without a profiler's scope, which takes longer than the work."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, all parameters of a group at once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            parameters, gradients, first, second, largest_second, steps = lists
            if not parameters:
                continue
            torch._foreach_add_(steps, 1)
            _fused_adam(
                parameters,
                gradients,
                first,
                second,
                largest_second,
                steps,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
            )
        return loss


# ---------------------------------------------------------------- either way


def class_names(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """The classes of optimizers by which their states can be exchanged: :class:`FusedAdam` counts as ``Adam``."""
    return ["Adam" if isinstance(o, FusedAdam) else type(o).__name__ for o in optimizers]


def adam(module: "ControlModule", parameters: Iterable, lr: float, eps: float) -> torch.optim.Optimizer:
    """Returns Adam; fused except under mixed precision, where Lightning refuses to clip its gradients."""
    fused = module.trainer.precision in ("32-true", "64-true")
    if fused and is_fast():
        return FusedAdam(parameters, lr=lr, eps=eps)
    return torch.optim.Adam(parameters, lr=lr, eps=eps, fused=fused)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor | None:
    """Scales gradients in place to a global norm of at most ``max_norm``; returns the norm before, None without any."""
    with_gradients = [p for p in parameters if p.grad is not None]
    if not with_gradients:
        return None
    if not is_fast():
        return torch.nn.utils.clip_grad_norm_(with_gradients, max_norm)
    # torch's sorts by device and dtype, which takes longer than the norm.
    gradients = [p.grad for p in with_gradients if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    # On a CPU the norm is known here, and most gradients need no second pass. On a GPU the check would synchronise.
    if norm.is_cpu and not is_recording() and float(norm) + 1e-6 <= max_norm:
        return norm
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
