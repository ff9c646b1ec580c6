"""The networks of DQN and of its distributional variants, with one or more outputs per action."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as nnf

from rl_modules.fast.modules import call
from rl_modules.networks.encoders import build_encoder, encoding_width
from rl_modules.networks.layers import ParallelLinear, ParallelMLP, hidden_widths, last_layer, mlp


class QNetwork(nn.Module):
    """Q(s, ·): the value of every action, on one encoder, [B, *obs] → [B, n_actions] float32."""

    def __init__(
        self,
        observation_space: spaces.Space,
        n_actions: int,
        net_arch: Sequence[int] | None = None,
        activation_fn: str = "relu",
        dueling: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = build_encoder(observation_space)
        sizes = [encoding_width(self.encoder), *hidden_widths(observation_space, net_arch)]
        self.dueling = dueling
        split = max(len(sizes) - 1, 1) if dueling else len(sizes)
        self.trunk = mlp(sizes[:split], activation_fn)
        if dueling:
            self.streams = ParallelMLP(2, sizes[split - 1 :], activation_fn)
            self.value_head = nn.Linear(sizes[-1], 1)
        self.head = nn.Linear(sizes[-1], n_actions)

    def forward(self, observation: Any) -> Tensor:
        if not self.dueling:
            return apply_tower(self.trunk, self.head, call(self.encoder, observation))
        features = call(self.trunk, call(self.encoder, observation).to(self.head.weight.dtype))
        for_value, for_advantage = call(self.streams, features)
        advantage = last_layer(self.head, for_advantage)
        return last_layer(self.value_head, for_value) + advantage - advantage.mean(1, keepdim=True)


class DistributionalQNetwork(QNetwork):
    """N numbers that describe the distribution of every action's return, [B, *obs] → [B, N, A] float32."""

    def __init__(
        self,
        observation_space: spaces.Space,
        n_actions: int,
        n_numbers: int,
        net_arch: Sequence[int] | None = None,
        activation_fn: str = "relu",
        dueling: bool = False,
    ) -> None:
        super().__init__(observation_space, n_actions * n_numbers, net_arch, activation_fn, dueling)
        self.n_numbers = n_numbers
        if dueling:
            self.value_head = nn.Linear(self.head.in_features, n_numbers)

    def forward(self, observation: Any) -> Tensor:
        features = self.trunk(self.encoder(observation).to(self.head.weight.dtype))
        if not self.dueling:
            return last_layer(self.head, features).unflatten(1, (self.n_numbers, -1))
        for_value, for_advantage = self.streams(features)
        advantage = last_layer(self.head, for_advantage).unflatten(1, (self.n_numbers, -1))
        return last_layer(self.value_head, for_value)[..., None] + advantage - advantage.mean(2, keepdim=True)


def of_actions(numbers: Tensor, action: Tensor) -> Tensor:
    """Returns the numbers of one action per row, [B, N] from [B, N, A] and [B]."""
    return numbers.gather(2, action[:, None, None].expand(-1, numbers.shape[1], 1)).squeeze(2)


def apply_tower(trunk: nn.Sequential, head: nn.Linear, features: Tensor) -> Tensor:
    """Hidden layers and head, [B, in] → [B, out]."""
    return last_layer(head, call(trunk, features.to(head.weight.dtype)))


#: σ₀: the initial noise is σ₀ / √in.
SIGMA = 0.5


class NoisyLinear(nn.Module):
    """A linear layer with weights μ + σ ⊙ ε and biases likewise, f(x) = sgn(x) √|x|.

    ε is f(ε_out) f(ε_in)ᵀ for the weights [out, in], its transpose for those of parallel layers [K, in, out], and
    f(ε_out) for the biases.

    Without noise, as after :func:`remove_noise`, the weights are μ.

    Source: Fortunato et al. 2018, arXiv:1706.10295, section 3, factorised Gaussian noise.
    """

    def __init__(self, layer: nn.Linear | ParallelLinear) -> None:
        super().__init__()
        self.is_parallel = isinstance(layer, ParallelLinear)
        # [out, in] and [out], or K of [in, out] and [1, out].
        self.in_features = layer.weight.shape[1]
        self.lead = tuple(layer.weight.shape[:-2])
        self.out_features = layer.weight.shape[2 if self.is_parallel else 0]
        bound, sigma = 1 / math.sqrt(self.in_features), SIGMA / math.sqrt(self.in_features)
        self.weight_mean = nn.Parameter(torch.empty_like(layer.weight).uniform_(-bound, bound))
        self.bias_mean = nn.Parameter(torch.empty_like(layer.bias).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full_like(layer.weight, sigma))
        self.bias_sigma = nn.Parameter(torch.full_like(layer.bias, sigma))
        self._noise: tuple[Tensor, Tensor] | None = None

    def resample(self, generator: torch.Generator | None) -> None:
        """Draws new noise."""
        device = self.weight_mean.device
        source = device if generator is None else generator.device
        size = (*self.lead, self.in_features + self.out_features)
        drawn = torch.randn(size, generator=generator, device=source, dtype=torch.float32).to(self.weight_mean)
        shaped = drawn.sign() * drawn.abs().sqrt()
        into, out = shaped.split([self.in_features, self.out_features], dim=-1)
        if self.is_parallel:
            self._noise = into[..., None] * out[..., None, :], out[..., None, :]
        else:
            self._noise = out[:, None] * into, out

    def remove_noise(self) -> None:
        """Sets the noise to 0."""
        self._noise = None

    @property
    def weight(self) -> Tensor:
        """μ + σ ⊙ ε, or μ."""
        if self._noise is None:
            return self.weight_mean
        return torch.addcmul(self.weight_mean, self.weight_sigma, self._noise[0])

    @property
    def bias(self) -> Tensor:
        """The same of the bias."""
        return self.bias_mean if self._noise is None else torch.addcmul(self.bias_mean, self.bias_sigma, self._noise[1])

    def extra_repr(self) -> str:
        of = f"{self.lead[0]} of " if self.is_parallel else ""
        return f"{of}in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight) if self.is_parallel else nnf.linear(x, self.weight, self.bias)


def make_noisy(network: Any) -> Any:
    """Replaces every linear layer of a network by a noisy one, but those of its encoder; returns the network."""
    for name, part in list(network.named_children()):
        if isinstance(part, nn.Linear | ParallelLinear):
            setattr(network, name, NoisyLinear(part))
        elif name != "encoder":
            make_noisy(part)
    return network


def resample(network: nn.Module, generator: torch.Generator | None) -> None:
    """Draws new noise for every noisy layer of a network."""
    for layer in network.modules():
        if isinstance(layer, NoisyLinear):
            layer.resample(generator)


def remove_noise(network: nn.Module) -> None:
    """Sets the noise of every noisy layer of a network to 0."""
    for layer in network.modules():
        if isinstance(layer, NoisyLinear):
            layer.remove_noise()
