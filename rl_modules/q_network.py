"""The networks of DQN and of its distributional variants, with one or more outputs per action."""

import functools
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.spaces import is_image
from rl_modules.encoders import build_encoder, encoding_width
from rl_modules.layers import ParallelMLP, call, hidden_widths, is_hooked, last_layer, mlp
from rl_modules.noisy import NoisyLinear
from rl_modules.relu_mlp import is_fast, pays, relu_mlp


class QNetwork(nn.Module):
    """Q(s, ·): the value of every action, on one encoder.

    Args:
        observation_space: space of one observation.
        n_actions: number of actions.
        net_arch: widths of the hidden layers; None: [64, 64], and none after a convolutional encoder.
        activation_fn: ``tanh``, ``relu``, …
        dueling: V(s) and advantages A(s, ·) as separate streams from the last hidden layer on, which each has its own;
            Q = V + A - mean A (Wang et al. 2016, arXiv:1511.06581, eq. 9).

    Shape: [B, *obs] → [B, n_actions] float32.
    """

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
        if net_arch is None:
            net_arch = [] if is_image(observation_space) else [64, 64]
        sizes = [encoding_width(self.encoder), *hidden_widths(net_arch)]
        self.dueling = dueling
        split = len(sizes) - 1 if dueling and net_arch else len(sizes)
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
    """N numbers that describe the distribution of the return of every action, on one encoder.

    Args:
        observation_space: space of one observation.
        n_actions: number of actions, A.
        n_numbers: N.
        net_arch: widths of the hidden layers; None: [64, 64], and none after a convolutional encoder.
        activation_fn: ``tanh``, ``relu``, …
        dueling: N numbers of V(s) and of the advantages in separate streams, joined as in :class:`QNetwork`.

    Shape: [B, *obs] → [B, N, A] float32.
    """

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
    """Computes the output of hidden layers and a head, in float32 at least: [B, in] → [B, out].

    Linear and ReLU layers in turn, as built and without hooks, go through :func:`rl_modules.relu_mlp.relu_mlp` where it
    is faster.
    """
    x = features.to(head.weight.dtype)
    if is_fast(x) and type(trunk) is nn.Sequential:
        parts: list[Any] = [*trunk, head]
        if _are_relu_layers(tuple(map(type, parts))):
            weights = [layer.weight for layer in parts[::2]]
            # A hook may change what a layer computes: pruning is one, and a parametrization makes another class.
            if pays(x, weights) and not (is_hooked(trunk) or any(map(is_hooked, parts))):
                biases = [layer.bias for layer in parts[::2]]
                if all(bias is not None for bias in biases):
                    return relu_mlp(x, weights, biases)
    return last_layer(head, call(trunk, x))


@functools.lru_cache
def _are_relu_layers(types: tuple[type, ...]) -> bool:
    """Returns whether these are linear layers with ReLU between them; subclasses may compute something else."""
    return len(types) % 2 == 1 and {*types[1::2]} <= {nn.ReLU} and {*types[::2]} <= {nn.Linear, NoisyLinear}
