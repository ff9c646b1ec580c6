"""Layers that a GPU computes with fewer passes over its memory, in place of a model's own; its weights stay.

Transformers normalises in six operators, each of which reads and writes all activations, and keeps three of their
results for the backward pass; torch's fused norm is one operator that keeps its input. A gated feed-forward layer keeps
act(gate(x)) beside gate(x), from which it is computed again here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_modules.common.modules import evaluation_mode

_GATED = ["gate_proj", "up_proj", "down_proj", "act_fn"]


class FusedNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) · weight over the last dimension, in float32; the result has the type of x · weight."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(dtype)
        return nn.functional.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps).to(dtype)


class _Gated(torch.autograd.Function):
    """act(gate) · up, from which only these two are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            active = ctx.act(leaf)
        (slope,) = torch.autograd.grad(active, leaf, grad * up)
        return slope, grad * active.detach(), None


class GatedLayer(nn.Module):
    """down(act(gate(x)) · up(x)), made of another's parts."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        for name in _GATED:
            self.add_module(name, other.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x), self.act_fn))


def lighten(module: nn.Module) -> None:
    """Replaces the layers within a module that give the same numbers as one of these."""
    for parent in list(module.modules()):
        for name, layer in parent.named_children():
            lighter = _norm_of(layer) or _gated_of(layer)
            if lighter is not None and _agree(layer, lighter):
                parent._modules[name] = lighter.train(layer.training)


def _norm_of(layer: nn.Module) -> FusedNorm | None:
    eps, weight = getattr(layer, "variance_epsilon", getattr(layer, "eps", None)), layer._parameters.get("weight")
    if weight is None or weight.ndim != 1 or not isinstance(eps, float) or isinstance(layer, FusedNorm):
        return None
    norm = FusedNorm(list(weight.shape), eps, device="meta")
    norm.weight = weight
    return norm


def _gated_of(layer: nn.Module) -> GatedLayer | None:
    is_gated = layer._modules.keys() == set(_GATED) and not isinstance(layer, GatedLayer)
    act = layer._modules.get("act_fn")
    return GatedLayer(layer) if is_gated and act is not None and not list(act.parameters()) else None


@torch.no_grad()
def _agree(layer: nn.Module, lighter: Any) -> bool:
    """Whether two layers give the same numbers, in each type that they may be given."""
    is_norm = isinstance(lighter, FusedNorm)
    own = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    try:
        size = lighter.weight.numel() if is_norm else lighter.gate_proj.in_features
        x = torch.linspace(-9, 9, 4 * size, device=next(layer.parameters()).device).sin().reshape(1, 4, size)
        with evaluation_mode([*layer.modules(), *lighter.modules()]):
            for dtype in {own, torch.float32, torch.bfloat16} if is_norm else {own}:
                a, b = layer(x.to(dtype)), lighter(x.to(dtype))
                most = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2  # one of them may round twice
                if a.dtype != b.dtype or not bool((a - b).abs().max() <= most * a.abs().max()):
                    return False
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False  # a layer of other arguments
    return True
