"""Hidden layers that a user changed: a large batch, which the fast MLP is for, gives what its layers give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from rl_modules.networks.critics import Critics, DeterministicPolicy, SquashedGaussianPolicy
from rl_modules.networks.layers import mlp
from rl_modules.networks.q_network import QNetwork, apply_tower

WIDTH = 256


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Negative(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) ** 2


def appended(layer: Callable[[], nn.Module]) -> Callable:
    return lambda trunk, head: (trunk.append(layer()), head)


def replaced(i: int, layer: Callable[[], nn.Module]) -> Callable:
    def change(trunk: nn.Sequential, head: nn.Module) -> tuple[nn.Module, nn.Module]:
        trunk[i] = layer()
        return trunk, head

    return change


def on_layer(act: Callable[[Any], Any]) -> Callable:
    def change(trunk: nn.Sequential, head: nn.Module) -> tuple[nn.Module, nn.Module]:
        act(trunk[2])
        return trunk, head

    return change


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, inputs, output: output + 1.0)


def own_forward(layer: Any) -> None:
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 3


def hooked_trunk(trunk: nn.Sequential, head: nn.Module) -> tuple[nn.Module, nn.Module]:
    hooked(trunk)
    return trunk, head


CHANGES: dict[str, Callable] = {
    "a linear layer more": appended(lambda: nn.Linear(WIDTH, WIDTH)),
    "two linear layers more": lambda trunk, head: (trunk.extend([nn.Linear(WIDTH, WIDTH) for _ in "ab"]), head),
    "layer normalisation": appended(lambda: nn.LayerNorm(WIDTH)),
    "dropout": appended(lambda: nn.Dropout(0.5)),
    "a subclass of Linear": replaced(0, lambda: Doubled(WIDTH, WIDTH)),
    "a subclass of ReLU": replaced(1, Negative),
    "another activation": replaced(3, nn.Tanh),
    "no bias": replaced(2, lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "a subclass as head": lambda trunk, head: (trunk, Doubled(WIDTH, 7)),
    "a subclass of Sequential": lambda trunk, head: (Residual(*trunk), head),
    "a module that is no Sequential": lambda trunk, head: (Wrapped(trunk), head),
    "a hook": on_layer(hooked),
    "a hook on all": hooked_trunk,
    "a parametrization": on_layer(parametrizations.spectral_norm),
    "pruning": on_layer(lambda layer: prune.random_unstructured(layer, "weight", amount=0.5)),
    "a forward of the instance": on_layer(own_forward),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_trunk_gives_what_its_layers_give(name: str) -> None:
    torch.manual_seed(0)
    trunk, head = CHANGES[name](mlp([WIDTH] * 3, "relu"), nn.Linear(WIDTH, 7))
    trunk.eval()
    x = torch.randn(WIDTH, WIDTH)
    torch.testing.assert_close(apply_tower(trunk, head, x), head(trunk(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda space: QNetwork(space, 2, [WIDTH, WIDTH]),
    lambda space: SquashedGaussianPolicy(space, 2, [WIDTH, WIDTH]),
    lambda space: DeterministicPolicy(space, 2, [WIDTH, WIDTH]),
])  # fmt: skip
@pytest.mark.parametrize("change", [
    appended(lambda: nn.Linear(WIDTH, WIDTH)), appended(lambda: nn.LayerNorm(WIDTH)),
    replaced(2, lambda: Doubled(WIDTH, WIDTH)),
])  # fmt: skip
def test_rows_of_a_large_batch_equal_those_of_small_ones(make: Callable, change: Callable) -> None:
    torch.manual_seed(0)
    network = make(spaces.Box(-1, 1, (5,), np.float32))
    change(network.trunk, network.head)
    x = torch.randn(WIDTH, 5)
    together, each = network(x), [network(rows) for rows in x.split(8)]
    if isinstance(together, tuple):
        together, each = together[0], [mean for mean, _ in each]
    torch.testing.assert_close(together, torch.cat(each), rtol=1e-4, atol=1e-5)


def test_critics_with_another_activation_take_it_in_every_batch() -> None:
    torch.manual_seed(0)
    critics = Critics(spaces.Box(-1, 1, (5,), np.float32), 2, 2, [WIDTH, WIDTH])
    critics.activation = nn.Softplus()
    observation, action = torch.randn(WIDTH, 5), torch.rand(WIDTH, 2)
    pairs = zip(observation.split(8), action.split(8), strict=True)
    each = torch.cat([critics(*pair) for pair in pairs], dim=1)
    torch.testing.assert_close(critics(observation, action), each, rtol=1e-4, atol=1e-5)
