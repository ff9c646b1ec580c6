"""Layers that the networks of the control algorithms are made of."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.spaces import is_image
from rl_modules.fast import is_fast
from rl_modules.fast.modules import FastTanh, call
from rl_modules.functional.checks import as_float

#: Rows from which the gradient of the weights of a batched product, which cuBLAS does not split along the rows, takes
#: longer than those of single ones: on an H200 970 µs for 32,768 rows of two layers of 64.
_MANY_ROWS = 1024

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
}


def activation(name: str) -> nn.Module:
    """Returns the activation module called ``name``."""
    if name not in ACTIVATIONS:
        raise UsageError(
            f"activation_fn={name!r} is unknown; it must be one of {', '.join(ACTIVATIONS)}"
            f"{did_you_mean(name, ACTIVATIONS)}"
        )
    return FastTanh() if name == "tanh" and is_fast() else ACTIVATIONS[name]()


def orthogonal(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Sets orthogonal weights and zero biases in every linear or convolutional layer within ``layer``.

    Source: Saxe et al. 2014, arXiv:1312.6120; the gains are those of the original PPO code.
    """
    for part in layer.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(part.weight, gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, ParallelLinear):
            for weight in part.weight.data:
                nn.init.orthogonal_(weight, gain)
            nn.init.zeros_(part.bias)
    return layer


def mlp(sizes: Sequence[int], activation_fn: str = "tanh") -> nn.Sequential:
    """Linear layers of the given sizes, each followed by the activation."""
    layers: list[nn.Module] = []
    for width_in, width_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(width_in, width_out), activation(activation_fn)]
    return nn.Sequential(*layers)


class ParallelLinear(nn.Module):
    """K independent linear layers of one size in one kernel, [K, B, in_features] → [K, B, out_features]."""

    def __init__(self, k: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)  # as nn.Linear
        self.weight = nn.Parameter(torch.empty(k, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(k, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.is_grad_enabled() and x.shape[1] >= _MANY_ROWS:
            each = zip(self.bias.unbind(), x.unbind(), self.weight.unbind(), strict=True)
            return torch.stack([torch.addmm(*layer) for layer in each])
        return torch.baddbmm(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        k, in_features, out_features = self.weight.shape
        return f"{k} of in_features={in_features}, out_features={out_features}"


class ParallelMLP(nn.Module):
    """K MLPs with one input and the same widths, [B, sizes[0]] → K tensors [B, sizes[-1]], in one kernel per layer."""

    def __init__(self, k: int, sizes: Sequence[int], activation_fn: str = "tanh") -> None:
        super().__init__()
        self.k = k
        layers: list[nn.Module] = []
        for width_in, width_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [ParallelLinear(k, width_in, width_out), activation(activation_fn)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        latents: Tensor = call(self.layers, x.expand(self.k, *x.shape))
        return latents.unbind(0)


def hidden_widths(space: spaces.Space, net_arch: Any, default: Sequence[int] = (64, 64)) -> list[int]:
    """Returns the widths of hidden layers; None: the default ones, and none after a convolutional encoder."""
    check_widths("net_arch", [net_arch] if isinstance(net_arch, dict) else net_arch)
    return list(net_arch) if net_arch is not None else [] if is_image(space) else list(default)


def tower_widths(
    space: spaces.Space, net_arch: Any, towers: tuple[str, str], default: Any = (64, 64)
) -> tuple[list[int], list[int]]:
    """Returns the widths of two towers, from a list for both or a dictionary; see :func:`hidden_widths`."""
    if net_arch is None and not is_image(space):
        net_arch = default
    if not isinstance(net_arch, dict):
        widths = hidden_widths(space, net_arch)
        return widths, widths
    if set(net_arch) != set(towers):
        raise UsageError(
            f"net_arch={net_arch} must be a dictionary with the keys {' and '.join(towers)}, or one list for both"
        )
    first, second = (hidden_widths(space, net_arch[name]) for name in towers)
    return first, second


def check_widths(name: str, net_arch: Any) -> Any:
    """Refuses widths of hidden layers that are no positive whole numbers."""
    parts = net_arch.values() if isinstance(net_arch, dict) else [net_arch]
    for part in parts:
        if part is None:
            continue
        widths = part if isinstance(part, list | tuple) else [None]
        if not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths):
            raise UsageError(f"{name}={net_arch} must be a list of hidden widths of at least 1, such as [64, 64]")
    return net_arch


def last_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)`` in float32 at least, under autocast too: bfloat16's numbers around 90 are half a unit apart."""
    if not torch.is_autocast_enabled(x.device.type):
        return as_float(call(layer, x))
    with torch.autocast(x.device.type, enabled=False):
        return as_float(call(layer, as_float(x)))
