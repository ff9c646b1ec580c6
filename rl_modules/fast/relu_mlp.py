"""MLPs with ReLU in oneDNN's matrix products, with a backward pass written by hand.

On a CPU, torch multiplies float32 matrices by MKL, which does not use AVX-512 on processors other than Intel's. oneDNN,
which torch also includes, does: a product of 256×256 matrices there takes 0.17 ms instead of 0.37. One autograd node
for the whole network, instead of one per operation, saves as much again for small ones.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_modules.fast import is_fast
from rl_modules.fast.modules import GLOBAL_HOOKS

#: Smallest dimension of a product for which oneDNN is faster.
SMALLEST = 32
#: Number of multiplications in a forward pass above which the Python call in the backward pass pays off.
WORTHWHILE = 3_000_000

_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def is_hooked(layer: nn.Module) -> bool:
    """Returns whether ``layer(x)`` does more than its class's ``forward``."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
        or any(GLOBAL_HOOKS)
    )


def takes(x: Tensor) -> bool:
    """Returns whether :func:`relu_mlp` takes the input: plain float32 on a CPU with oneDNN."""
    # Compilation comes first: a comparison of the batch size would fix it in an exported program. A traced one can't be
    # saved with oneDNN's product in it.
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and _linear is not None
        and len(x) >= SMALLEST
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and is_fast()
    )


def pays(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Returns whether :func:`relu_mlp` takes the input and is faster than torch's layers, as at wide ones."""
    return takes(x) and len(x) * sum(w.shape[-1] * w.shape[-2] for w in weights) >= WORTHWHILE


def relu_mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """One MLP, or K of them on the same input, with ReLU between the layers."""
    parameters = [tensor for pair in zip(weights, biases, strict=True) for tensor in pair]
    if torch.is_grad_enabled():
        output: Tensor = _ReluMLP.apply(x, *parameters)
        return output
    return _forward(x, parameters)[0]


def parallel_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """K linear layers, each on an input of its own, [K, B, in] → [K, B, out], in oneDNN where that pays."""
    k, b, width_in = x.shape
    if (
        takes(x[0])
        and b >= 256
        and min(width_in, weight.shape[2]) >= SMALLEST
        and k * b * width_in * weight.shape[2] >= WORTHWHILE
    ):
        each = zip(x.unbind(), weight.unbind(), bias.unbind(), strict=True)
        return torch.stack([relu_mlp(one, [w.t()], [c[0]]) for one, w, c in each])
    return torch.baddbmm(bias, x, weight)


class _ReluMLP(torch.autograd.Function):
    """Backpropagation through the whole network in one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        output, hidden = _forward(x, parameters)
        ctx.save_for_backward(x, *parameters, *hidden)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        n_layers = (len(ctx.needs_input_grad) - 1) // 2
        parameters, hidden = saved[: 2 * n_layers], saved[2 * n_layers :]
        if torch.is_grad_enabled():
            return _differentiable_backward([x, *parameters], ctx.needs_input_grad, gradient)
        weights = parameters[::2]
        needs_x, trains = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:])
        of_x: Tensor | None
        nothing: list[Tensor | None] = [None] * (2 * n_layers)
        if weights[0].dim() == 2:
            of_x, found = _backward(x, [w.t() for w in weights], hidden, gradient, needs_x, trains, linear=True)
            return of_x if needs_x else None, *(found if trains else nothing)
        each = []
        for k, own in enumerate(gradient.unbind()):
            inner = hidden[k * (n_layers - 1) : (k + 1) * (n_layers - 1)]
            each.append(_backward(x, [w[k] for w in weights], inner, own, needs_x, trains))
        of_x = functools.reduce(torch.add, (own for own, _ in each)) if needs_x else None
        if not trains:
            return of_x, *nothing
        stacked = [torch.stack(same) for same in zip(*(found for _, found in each), strict=True)]
        return of_x, *(g if i % 2 == 0 else g.unsqueeze(1) for i, g in enumerate(stacked))


def _differentiable_backward(
    inputs: Sequence[Tensor], needed: Sequence[bool], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Computes the gradients by torch's own layers, so that they can be differentiated again."""
    x, weights, biases = inputs[0], inputs[1::2], inputs[2::2]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = (x.relu() if i else x) @ (weight if weight.dim() == 3 else weight.t()) + bias
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(x, wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def _forward(x: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the output, and every hidden layer's, network after network."""
    weights, biases = parameters[::2], parameters[1::2]
    if weights[0].dim() == 2:
        return _tower(x, [w.t() for w in weights], biases)
    outputs, hidden = [], []
    for layers in zip(*(w.unbind() for w in weights), *(b.unbind() for b in biases), strict=True):
        output, inner = _tower(x, layers[: len(weights)], [b[0] for b in layers[len(weights) :]])
        outputs.append(output)
        hidden += inner
    return torch.stack(outputs), hidden


def _tower(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    hidden = []
    last = len(weights) - 1
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if min(weight.shape) >= SMALLEST:
            x = _linear(x, weight.t(), bias, "none" if i == last else "relu", [], "")  # type: ignore[misc]
        else:
            x = torch.addmm(bias, x, weight)
            if i < last:
                x = x.relu_()
        if i < last:
            hidden.append(x)
    return x, hidden


def _backward(
    x: Tensor,
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    gradient: Tensor,
    needs_x: bool,
    trains: bool,
    linear: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of a network's input, and of its weights and biases, layer after layer."""
    found: list[Tensor] = []
    for i in range(len(weights) - 1, -1, -1):
        below = hidden[i - 1] if i else x
        if trains:
            of_weight = _product(gradient.t(), below) if linear else _product(below.t(), gradient)
            found = [of_weight, gradient.sum(0), *found]
        if i or needs_x:
            gradient = _product(gradient, weights[i].t())
        if i:
            gradient = torch.ops.aten.threshold_backward(gradient, below, 0)
    return gradient, found


def _product(left: Tensor, right: Tensor) -> Tensor:
    if min(left.shape[0], left.shape[1], right.shape[1]) >= SMALLEST:
        product: Tensor = _linear(left, right.t(), None, "none", [], "")  # type: ignore[misc]
        return product
    return left.mm(right)
