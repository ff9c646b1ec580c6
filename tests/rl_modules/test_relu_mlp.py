"""The hand-written MLP against torch's layers: outputs, gradients, layouts, and which inputs reach it."""

from pathlib import Path

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.fast import relu_mlp
from rl_modules.networks.critics import SquashedGaussianPolicy

needs_onednn = pytest.mark.skipif(relu_mlp._linear is None, reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_FAST", "1")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def parallel(sizes: list[int], k: int) -> tuple[list[Tensor], list[Tensor]]:
    pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
    weights = [(randn(i, k, a, b) / a**0.5).requires_grad_() for i, (a, b) in enumerate(pairs)]
    biases = [randn(10 + i, k, 1, b).requires_grad_() for i, (_, b) in enumerate(pairs)]
    return weights, biases


def plain(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = x @ weight + bias
        if i < len(weights) - 1:
            x = x.relu()
    return x


@needs_onednn
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[5, 64, 48, 1], [40, 64, 25], [3, 1], [64, 16, 64, 33]])
def test_k_networks_equal_torchs_layers(sizes: list[int], k: int) -> None:
    x = randn(1, 70, sizes[0]).requires_grad_()
    weights, biases = parallel(sizes, k)
    assert relu_mlp.takes(x)
    ours = relu_mlp.relu_mlp(x, weights, biases)
    expected = plain(x, weights, biases)
    assert ours.shape == (k, 70, sizes[-1])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    direction = randn(2, *ours.shape)
    inputs = [x, *weights, *biases]
    found = torch.autograd.grad(ours, inputs, direction)
    for one, other, of in zip(found, torch.autograd.grad(expected, inputs, direction), inputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        # Fused optimizers read a gradient in the order of its parameter.
        assert one.stride() == of.stride() or one.numel() == max(one.shape)
    with torch.no_grad():
        assert torch.equal(relu_mlp.relu_mlp(x, weights, biases), ours)


@needs_onednn
def test_linear_layers_equal_torchs() -> None:
    layers = [nn.Linear(7, 64), nn.Linear(64, 40), nn.Linear(40, 3)]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    x = randn(1, 50, 7)
    ours = relu_mlp.relu_mlp(x, [layer.weight for layer in layers], [layer.bias for layer in layers])
    expected = network(x)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    parameters = list(network.parameters())
    direction = randn(2, 50, 3)
    for one, other, of in zip(
        torch.autograd.grad(ours, parameters, direction), torch.autograd.grad(expected, parameters, direction),
        parameters, strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.is_contiguous() and one.shape == of.shape


@needs_onednn
def test_frozen_weights_pass_gradients_to_the_input_alone() -> None:
    weights, biases = parallel([5, 64, 1], 2)
    x = randn(1, 40, 5).requires_grad_()
    frozen = relu_mlp.relu_mlp(x, [w.detach() for w in weights], [b.detach() for b in biases])
    [ours] = torch.autograd.grad(frozen.amin(0).sum(), [x])
    [expected] = torch.autograd.grad(plain(x, weights, biases).amin(0).sum(), [x])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("k", [0, 2])
def test_gradients_can_be_differentiated_again(k: int) -> None:
    """A gradient penalty: the derivative of ‖∂Q/∂x‖² in the weights."""
    if k:
        weights, biases = parallel([5, 64, 48, 1], k)
    else:
        layers = [nn.Linear(5, 64), nn.Linear(64, 48), nn.Linear(48, 1)]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    x = randn(1, 70, 5).requires_grad_()

    def penalty(output: Tensor) -> tuple[Tensor, ...]:
        [slope] = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), [*weights, *biases[:-1]])

    ours = penalty(relu_mlp.relu_mlp(x, weights, biases))
    transposed = weights if k else [weight.t() for weight in weights]
    expected = penalty(plain(x, transposed, biases))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@needs_onednn
@pytest.mark.parametrize("rows", [16, 256, 300])
@pytest.mark.parametrize("sizes", [(40, 200), (4, 256), (256, 1), (128, 128)])
def test_layers_on_inputs_of_their_own_equal_torchs(rows: int, sizes: tuple[int, int]) -> None:
    x = randn(1, 2, rows, sizes[0]).requires_grad_()
    [weight], [bias] = parallel(list(sizes), 2)
    ours, expected = relu_mlp.parallel_linear(x, weight, bias), torch.baddbmm(bias, x, weight)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    direction = randn(2, *ours.shape)
    inputs = [x, weight, bias]
    found = torch.autograd.grad(ours, inputs, direction)
    for one, other, of in zip(found, torch.autograd.grad(expected, inputs, direction), inputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.stride() == of.stride() or one.numel() == max(one.shape)


def test_inputs_that_torchs_layers_take() -> None:
    assert not relu_mlp.takes(randn(1, 50, 7).double())
    assert not relu_mlp.takes(randn(1, 8, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert not relu_mlp.takes(randn(1, 50, 7))
    seen = []
    torch.func.vmap(lambda x: seen.append(relu_mlp.takes(x)) or x)(randn(1, 3, 50, 7))
    torch.func.grad(lambda x: seen.append(relu_mlp.takes(x)) or x.sum())(randn(1, 50, 7))
    assert seen == [False, False]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_of_a_large_batch_can_be_saved(tmp_path: Path) -> None:
    policy, x = SquashedGaussianPolicy(spaces.Box(-1, 1, (5,)), 2, [256, 256]), randn(1, 70, 5)
    assert relu_mlp.pays(x, [policy.trunk[0].weight, policy.trunk[2].weight])
    torch.jit.trace(policy, x, check_trace=False).save(tmp_path / "policy.pt")
    traced = torch.jit.load(tmp_path / "policy.pt")
    torch.testing.assert_close(traced(x[:3]), policy(x[:3]))
