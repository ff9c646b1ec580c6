"""The convolutional encoder with the channels last in memory equals the plain one, for every form of an image."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_modules.networks.nature_cnn import NatureCNN

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_FAST", "1")


IMAGES = {
    "stacked frames": spaces.Box(0, 255, (4, 40, 44), np.uint8),
    "grey": spaces.Box(0, 255, (40, 44), np.uint8),
    "colour, channels last": spaces.Box(0, 255, (40, 44, 3), np.uint8),
    "stacked colour": spaces.Box(0, 255, (2, 40, 44, 3), np.uint8),
    "from 0 to 1": spaces.Box(0, 1, (3, 40, 44), np.float32),
    "floats to 255": spaces.Box(0, 255, (40, 44, 3), np.float32),
}


def made(space: spaces.Box, n: int = 33) -> tuple[NatureCNN, torch.Tensor]:
    torch.manual_seed(0)
    space.seed(0)
    return NatureCNN(space, 48), torch.from_numpy(np.stack([space.sample() for _ in range(n)]))


@needs_onednn
@pytest.mark.parametrize("name", IMAGES)
def test_it_equals_the_plain_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = made(IMAGES[name])
    fast = network(images)
    direction = torch.randn_like(fast)
    gradients = torch.autograd.grad(fast, list(network.parameters()), direction)
    monkeypatch.setenv("RL_FAST", "0")
    plain = network(images)
    assert "Relu" in type(fast.grad_fn).__name__ and not torch.equal(fast, plain)  # two ways there are
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(plain, list(network.parameters()), direction)
    for parameter, one, other in zip(network.parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert one.is_contiguous() and parameter.is_contiguous()


@needs_onednn
def test_gradients_can_be_differentiated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust regions take products with the curvature through the encoder."""
    network, images = made(IMAGES["stacked frames"])
    parameters = list(network.parameters())

    def curvature() -> tuple[torch.Tensor, ...]:
        slopes = torch.autograd.grad(network(images).square().mean(), parameters, create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), parameters)

    fast = curvature()
    monkeypatch.setenv("RL_FAST", "0")
    for one, other in zip(fast, curvature(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_hooks_small_batches_and_other_precisions_take_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: NatureCNN, image: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the plain layers should have been taken")

    monkeypatch.setattr(NatureCNN, "_with_channels_last", fails)
    network, images = made(IMAGES["stacked frames"])
    network(images[:8])
    with torch.autocast("cpu", torch.bfloat16):
        network(images)
    network.double()(images)
    network.float()
    seen = []
    network.convolutions[2].register_forward_hook(lambda *_: seen.append(1))
    network(images)
    assert seen == [1]
    other, _ = made(IMAGES["stacked frames"])
    other.convolutions[4].register_full_backward_hook(lambda *_: seen.append(2))
    other(images).sum().backward()
    assert seen == [1, 2]
    replaced, _ = made(IMAGES["stacked frames"])
    replaced.convolutions[1] = torch.nn.Tanh()
    replaced(images)
