"""The gradient of one of a step's losses, taken with its forward pass, which frees its activations.

A step of RLHFPPO trains two models of one size. With one backward pass for both, the activations of both are alive at
its start; taken first, the value model's are gone before the policy's come: the peak of a step falls from 2,504 to
1,579 MiB (``benchmarks.rlhf_step --memory``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_modules.fast import is_fast
from rl_modules.language.architecture import is_sharded


class _Taken(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(gradient.mul_(slope.to(gradient.dtype)) for gradient in gradients)


def loss_of(
    module: nn.Module, output: Callable[[], Tensor], loss: Callable[[Tensor], Tensor], weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weighted loss of ``output()``, that loss and the output; only the first has a gradient.

    That is the gradient of all of ``module``'s parameters that the loss depends on. Sharded weights get theirs in the
    one backward pass, and so do losses in half precision, which are scaled before it.
    """
    found = output()
    plain = loss(found)
    weighted = weight * plain
    device = found.device.type
    is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    named = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # Hooks of tensors would run here and in the one backward pass.
    is_hooked = any(parameter._backward_hooks for parameter in named)
    if is_fast() and weighted.requires_grad and not (is_half or is_hooked or is_sharded(module)):
        with torch.autocast(device, enabled=False):  # as in Lightning's backward pass
            gradients = torch.autograd.grad(weighted, named, allow_unused=True)
        reached = [(w, g) for w, g in zip(named, gradients, strict=True) if g is not None]
        weighted = _Taken.apply(weighted.detach(), [g for _, g in reached], *(w for w, _ in reached))
    return weighted, plain.detach(), found.detach()
