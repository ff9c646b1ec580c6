import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from rl_modules.functional import token_entropy, token_log_probs, tokens
from tests.fake_device import DEVICE, fake_device

from .helpers import generator, randn, repeatable, seeds


def random_tokens(seed: int, words: int, *shape: int) -> torch.Tensor:
    return torch.randint(words, shape, generator=generator(seed))


def reference_log_probs(logits, chosen, temperature=1.0):
    return (logits / temperature).log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def reference_entropy(logits, temperature=1.0):
    log_prob = (logits / temperature).log_softmax(-1)
    return -(log_prob.exp() * log_prob).sum(-1)


def test_a_hand_worked_table():
    logits = torch.tensor([[[math.log(1.0), math.log(3.0)], [0.0, 0.0]]])
    result = token_log_probs(logits, torch.tensor([[1, 0]]))
    torch.testing.assert_close(result, torch.tensor([[math.log(0.75), math.log(0.5)]]))
    # At T = 1/2 the odds 3 : 1 are squared.
    result = token_log_probs(logits, torch.tensor([[1, 0]]), temperature=0.5)
    torch.testing.assert_close(result, torch.tensor([[math.log(0.9), math.log(0.5)]]))
    entropy = token_entropy(logits)
    expected = torch.tensor([[-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)]])
    torch.testing.assert_close(entropy, expected)


def test_nothing_is_shifted():
    logits = torch.full((1, 4, 4), -30.0)
    chosen = torch.tensor([[2, 0, 3, 1]])
    logits.scatter_(-1, chosen.unsqueeze(-1), 30.0)
    torch.testing.assert_close(token_log_probs(logits, chosen), torch.zeros(1, 4))
    assert (token_log_probs(logits, chosen.roll(1, -1)) < -50).all()


@pytest.fixture(params=[1, 10, 24, 45, 60, 10**6])
def piece(request, monkeypatch):
    """Every way of cutting up (4, 3, 5) logits: into rows, some rows, sequences, some sequences, or not at all."""
    monkeypatch.setattr(tokens, "_PIECE_CPU", request.param)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_with_the_gradient_in_place_of_the_logits(temperature, dtype):
    logits = (30 * randn(0, 4, 3, 5)).to(dtype)
    logits[0, 0, 2] = -torch.inf
    leaf, chosen = logits.double().clone().requires_grad_(), random_tokens(1, 5, 4, 3)
    chosen[0, 0] = 1
    expected = reference_log_probs(leaf, chosen, temperature)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    found = tokens.log_probs_and_gradient(logits, chosen, temperature)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(logits.double(), slope, rtol=5e-3 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_device_reads_half_precision_without_a_copy(temperature):
    logits, chosen, weight = randn(0, 4, 3, 50).bfloat16() * 8, random_tokens(1, 50, 4, 3), randn(2, 4, 3)

    def found(device):
        leaf = logits.to(device)
        target, factor = chosen.to(device), weight.to(device)
        log_prob = token_log_probs(leaf, target, temperature)
        normaliser = (leaf.float() / temperature).logsumexp(-1, keepdim=True)
        slope = tokens.token_log_probs_gradient(leaf, target, normaliser, factor, temperature, torch.empty_like(leaf))
        entropy = token_entropy(leaf, temperature)
        both = leaf.clone()
        return [log_prob, slope, entropy, tokens.log_probs_and_gradient(both, target, temperature), both]

    expected = found("cpu")
    with fake_device():
        for ours, other in zip(found(DEVICE), expected, strict=True):
            torch.testing.assert_close(ours.inner, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_log_softmax(temperature):
    logits = randn(0, 4, 3, 5).requires_grad_()
    chosen = random_tokens(1, 5, 4, 3)
    weight = randn(2, 4, 3)
    for ours, reference in (
        (token_log_probs(logits, chosen, temperature), reference_log_probs(logits, chosen, temperature)),
        (token_entropy(logits, temperature), reference_entropy(logits, temperature)),
    ):
        torch.testing.assert_close(ours, reference)
        (gradient,) = torch.autograd.grad((ours * weight).sum(), logits)
        (expected,) = torch.autograd.grad((reference * weight).sum(), logits)
        torch.testing.assert_close(gradient, expected)


@repeatable
@given(seeds, st.floats(0.2, 5), st.floats(-1e4, 1e4))
def test_laws_of_the_softmax(seed, temperature, shift):
    logits = randn(seed, 2, 3, 6) * 3
    chosen = random_tokens(seed, 6, 2, 3)
    log_prob = token_log_probs(logits, chosen, temperature)
    torch.testing.assert_close(token_log_probs(logits + shift, chosen, temperature), log_prob, atol=1e-9, rtol=0)
    torch.testing.assert_close(token_log_probs(logits / temperature, chosen), log_prob)
    every = torch.stack([token_log_probs(logits, torch.full_like(chosen, v), temperature) for v in range(6)], -1)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(2, 3).double())
    torch.testing.assert_close(token_entropy(logits, temperature), -(every.exp() * every).sum(-1))


def test_gradients_by_finite_differences():
    logits = randn(0, 2, 2, 4).requires_grad_()
    chosen = random_tokens(1, 4, 2, 2)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, chosen, 0.8), (logits,))
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, 0.8), (logits,))


def test_limits_of_the_entropy():
    torch.testing.assert_close(token_entropy(torch.zeros(1, 1, 50)), torch.full((1, 1), math.log(50)))
    certain = torch.tensor([[[100.0, 0.0, -100.0]]])
    assert token_entropy(certain).item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(token_entropy(certain, temperature=1e6), torch.full((1, 1), math.log(3)))


def test_words_that_are_ruled_out_count_nothing():
    logits = randn(0, 2, 3, 6)
    open_words = logits[..., :4]
    logits[..., 4:] = -torch.inf
    logits.requires_grad_()
    chosen = random_tokens(1, 4, 2, 3)
    torch.testing.assert_close(token_log_probs(logits, chosen), token_log_probs(open_words, chosen))
    torch.testing.assert_close(token_entropy(logits), token_entropy(open_words))
    assert (token_log_probs(logits, torch.full_like(chosen, 5)) == -torch.inf).all()
    for result in (token_log_probs(logits, chosen), token_entropy(logits)):
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert gradient.isfinite().all()
        assert (gradient[..., 4:] == 0).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_the_entropys_gradient_is_a_number_where_words_are_ruled_out(scale, compiled, monkeypatch):
    """Also below temperature 1, and under the factor of a gradient scaler."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    logits = randn(0, 2, 3, 6)
    logits[..., 4:] = -torch.inf
    open_words = logits[..., :4].clone().requires_grad_()
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(scale * token_entropy(logits, 0.5).sum(), logits)
    (expected,) = torch.autograd.grad(scale * token_entropy(open_words, 0.5).sum(), open_words)
    torch.testing.assert_close(gradient[..., :4], expected)
    assert (gradient[..., 4:] == 0).all()


@pytest.mark.parametrize("size", [60.0, 3e4, -60.0, -3e4])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_large_logits_neither_overflow_nor_lose_digits(size, temperature):
    # The second row is harmless: it must not be spoilt by, nor hide, the first.
    logits = torch.tensor([[[size, size - 1.0, size - 2e4], [1.0, 2.0, 3.0]]], requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    tokens = torch.tensor([[1, 0]])
    log_prob, expected = token_log_probs(logits, tokens, temperature), reference_log_probs(exact, tokens, temperature)
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-6, rtol=0)
    entropy, expected_entropy = token_entropy(logits, temperature), reference_entropy(exact, temperature)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-6, rtol=0)
    for ours, reference in ((log_prob, expected), (entropy, expected_entropy)):
        (gradient,) = torch.autograd.grad(ours.sum(), logits)
        (expected_gradient,) = torch.autograd.grad(reference.sum(), exact)
        # Beside 1e5 the saved logarithm is rounded to 4e-3.
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=abs(size) / temperature * 1e-7, rtol=0)


def test_a_row_of_nan_stays_one():
    logits = torch.randn(1, 2, 3)
    logits[0, 0, 1] = torch.nan
    result = token_log_probs(logits, torch.zeros(1, 2, dtype=torch.long))
    assert result[0, 0].isnan()
    assert result[0, 1].isfinite()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_float32_log_probs(half):
    logits = (randn(0, 2, 5, 300, dtype=torch.float32) * 3).to(half).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    chosen = random_tokens(1, 300, 2, 5)
    for ours, reference in (
        (token_log_probs(logits, chosen, 0.9), reference_log_probs(exact, chosen, 0.9)),
        (token_entropy(logits, 0.9), reference_entropy(exact, 0.9)),
    ):
        assert ours.dtype is torch.float32
        # The logits are what they are; from there on only float32 rounding is allowed, not 1e-2.
        torch.testing.assert_close(ours.double(), reference, atol=2e-5, rtol=0)
        (gradient,) = torch.autograd.grad(ours.sum(), logits)
        (expected,) = torch.autograd.grad(reference.sum(), exact)
        assert gradient.dtype is half
        torch.testing.assert_close(gradient.double(), expected, atol=1e-4, rtol=torch.finfo(half).eps)


def test_a_slice_of_a_models_logits_is_used_as_it_is():
    logits = randn(0, 3, 6, 5).requires_grad_()
    chosen = random_tokens(1, 5, 3, 6)
    sliced = token_log_probs(logits[:, :-1], chosen[:, 1:])
    torch.testing.assert_close(sliced, reference_log_probs(logits, chosen.roll(-1, -1))[:, :-1])
    (gradient,) = torch.autograd.grad(sliced.sum(), logits)
    assert (gradient[:, -1] == 0).all()
    (expected,) = torch.autograd.grad(reference_log_probs(logits[:, :-1], chosen[:, 1:]).sum(), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 4), (0, 3), (2, 0)])
def test_any_number_of_leading_dimensions(shape):
    logits = randn(0, *shape, 5)
    chosen = random_tokens(1, 5, *shape)
    torch.testing.assert_close(token_log_probs(logits, chosen), reference_log_probs(logits, chosen))
    torch.testing.assert_close(token_entropy(logits), reference_entropy(logits))


def test_inputs_stay_as_they_are():
    logits = randn(0, 2, 3, 5).requires_grad_()
    copy, chosen = logits.detach().clone(), random_tokens(1, 5, 2, 3)
    (token_log_probs(logits, chosen, 0.5) + token_entropy(logits, 0.5)).sum().backward()
    assert torch.equal(logits, copy)


def peak_bytes(function) -> int:
    """The largest sum of allocations that were alive at once, from the profiler's events in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as recording:
        function()
    alive = peak = 0
    for event in recording.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_tensor_of_the_logits_size(dtype):
    logits = randn(0, 8, 64, 4096, dtype=torch.float32).to(dtype).requires_grad_()
    chosen = random_tokens(1, 4096, 8, 64)
    size = logits.numel() * logits.element_size()
    for function in (lambda: token_log_probs(logits, chosen, 0.9), lambda: token_entropy(logits, 0.9)):
        kept = []
        assert peak_bytes(lambda: kept.append(function().sum())) < size / 2  # noqa: B023
        # The gradient itself is one such tensor.
        logits.grad = None
        assert size <= peak_bytes(kept.pop().backward) < size * 1.5
    # The yardstick would notice: plain log_softmax needs one in the forward pass already.
    assert peak_bytes(lambda: reference_log_probs(logits, chosen)) >= size


def test_refuses_by_name():
    logits = torch.zeros(2, 3, 5)
    chosen = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^tokens has shape \(2, 2\), expected \(2, 3\)"):
        token_log_probs(logits, chosen[:, :2])
    with pytest.raises(ValueError, match=r"^tokens has shape"):
        token_log_probs(logits, chosen.unsqueeze(-1))
    with pytest.raises(ValueError, match=r"^logits has shape"):
        token_entropy(logits[0, 0])
    with pytest.raises(ValueError, match=r"^logits has shape"):
        token_log_probs(logits[0, 0], chosen[0, 0])
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^temperature"):
            token_log_probs(logits, chosen, bad)
        with pytest.raises(ValueError, match=r"^temperature"):
            token_entropy(logits, bad)
