"""Transformers that keep less for the backward pass: what elementwise arithmetic gives is computed again there.

A gated feed-forward part keeps four tensors of its inner width per token, of which two follow from the others by a
multiplication and a sigmoid; a norm keeps its input twice. No matrix product is done twice.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: Norms that compute w · x / √(mean(x²) + ε), rounded to the input's precision before the weight.
NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})


#: Tokens that the backward pass takes at a time.
_PIECE = 2048


def keep_less(model: nn.Module) -> None:
    """Have the parts of a model that are known keep less; its outputs stay the same bit for bit.

    Args:
        model: of transformers; parts with adapters, or of other kinds, are left as they are.
    """
    for module in model.modules():
        if _is_gated(module):
            module.forward = MethodType(_gated_forward, module)
        elif type(module).__name__ in NORMS:
            module.forward = MethodType(_norm_forward, module)


def _is_gated(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(type(part) is nn.Linear and part.bias is None for part in parts)
    # Transformers has a class of its own for what is torch's SiLU.
    return plain and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return self.down_proj(self.act_fn(gate) * up)
    return _GatedDown.apply(gate, up, self.down_proj.weight)


def _norm_forward(self: Any, x: Tensor) -> Tensor:
    return _Norm.apply(x, self.weight, self.variance_epsilon)


class _GatedDown(torch.autograd.Function):
    """W (silu(g) · u); keeps g and u."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return nn.functional.linear(nn.functional.silu(gate) * up, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """∂silu(g)/∂g = σ + s - s σ,   σ = σ(g),   s = silu(g) = g σ; in pieces, for this is where memory peaks."""
        gate, up, weight = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        tensors = (x.flatten(0, -2).split(_PIECE) for x in (grad, gate, up, of_gate, of_up))
        for d, g, u, result_gate, result_up in zip(*tensors, strict=True):
            sigmoid = g.sigmoid()
            active = g * sigmoid
            if of_weight is not None:
                of_weight.addmm_(d.T, active * u)
            inner = d @ weight
            torch.mul(inner, active, out=result_up)
            torch.mul(inner.mul_(u), torch.addcmul(sigmoid + active, active, sigmoid, value=-1), out=result_gate)
        return of_gate, of_up, of_weight


class _Norm(torch.autograd.Function):
    """w · x r with r = 1/√(mean(x²) + ε); keeps x and r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """∂/∂x = r (v - n mean(v n)),   n = x r,   v = w ∂/∂y."""
        x, weight, scale = ctx.saved_tensors
        normed = x.to(torch.float32) * scale
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed.to(x.dtype)).flatten(0, -2).sum(0).to(weight.dtype)
        wide = (grad * weight).to(torch.float32)
        of_x = (wide - normed * (wide * normed).mean(-1, keepdim=True)) * scale
        return of_x.to(x.dtype), of_weight, None
