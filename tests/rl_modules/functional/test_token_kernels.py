"""Kernels of log-probabilities: float64's numbers, and what the functions hand to them."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_modules import fast
from rl_modules import functional as F
from rl_modules.functional import tokens as plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels() -> Any:
    """The kernels, on a GPU or in Triton's interpreter."""
    if find_spec("triton") is None or (DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1")
    from rl_modules.fast import softmax_kernels

    return softmax_kernels


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits without their last column of tokens, some of them impossible or large, and tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 5, 9000, generator=generator)
    logits[0, 0, :8192], logits[1, 1, 100:] = -torch.inf, -torch.inf
    logits[2, 2] += 300
    tokens = torch.randint(100, (3, 4), generator=generator)
    tokens[0, 0] = 8999
    return logits.to(DEVICE, dtype)[:, :-1], tokens.to(DEVICE)


def exact(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π, log Σ exp, entropies and the gradient of log π, in float64."""
    z = logits.double() / temperature
    log_p = z.log_softmax(-1)
    chosen = torch.zeros_like(z).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    log_prob = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return log_prob, z.logsumexp(-1), entropy, (chosen - log_p.exp()) / temperature


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_give_float64s_numbers(kernels: Any, dtype: torch.dtype, temperature: float) -> None:
    logits, tokens = example(dtype)
    log_prob, total, entropy, slope = exact(logits, tokens, temperature)
    close = {"rtol": 1e-5, "atol": 1e-5}
    half = close if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    found = kernels.token_statistics(logits, tokens, temperature, entropy=True)
    for ours, expected in zip(found, (log_prob, total, entropy), strict=True):
        torch.testing.assert_close(ours.double(), expected, **close)
    weight = torch.linspace(-1, 1, tokens.numel(), device=DEVICE).view(tokens.shape)
    room = torch.empty(3, 5, 9000, dtype=dtype, device=DEVICE)[:, 1:]
    of_logits = kernels.log_probs_gradient(logits, tokens, found[1].unsqueeze(-1), weight, temperature, room)
    torch.testing.assert_close(of_logits.double(), slope * weight.unsqueeze(-1), **half)
    copied = logits.clone()
    again, _, _ = kernels.token_statistics(copied, tokens, temperature, in_place=True)
    assert torch.equal(again, found[0])
    torch.testing.assert_close(copied.double(), slope, **half)


@pytest.mark.parametrize("words", [1, 50, 8192, 20000])
def test_the_check_passes_for_every_vocabulary_and_finds_a_wrong_kernel(
    kernels: Any, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kernels.require_exact(DEVICE, dtype, words)
    statistics = kernels.token_statistics
    monkeypatch.setattr(kernels, "token_statistics", lambda *a, **k: [x * 1.01 + 0.01 for x in statistics(*a, **k)])
    with pytest.raises(ArithmeticError, match="differ by"):
        kernels.require_exact(DEVICE, torch.float32, words)


def test_a_token_outside_of_the_vocabulary_is_not_read(kernels: Any) -> None:
    logits, tokens = example(torch.float32)
    tokens[1, 2], tokens[2, 3] = -1, 9000
    found, _, _ = kernels.token_statistics(logits, tokens, 1.0)
    assert found.isnan().nonzero().tolist() == [[1, 2], [2, 3]]


class Exact:
    """The kernels' interface, in float64."""

    @staticmethod
    def token_statistics(
        logits: Tensor, tokens: Tensor, temperature: float, entropy: bool = False, in_place: bool = False
    ) -> tuple[Tensor, ...]:
        assert logits.shape[:-1] == tokens.shape
        *found, slope = exact(logits, tokens, temperature)
        if in_place:
            logits.copy_(slope)
        return tuple(x.float() for x in (found if entropy else (*found[:2], torch.empty(0))))

    @staticmethod
    def log_probs_gradient(
        logits: Tensor, tokens: Tensor, normaliser: Tensor, grad: Tensor, temperature: float, out: Tensor
    ) -> Tensor:
        _, total, _, slope = exact(logits, tokens, temperature)
        torch.testing.assert_close(normaliser.squeeze(-1).double(), total, rtol=1e-5, atol=1e-5)
        return out.copy_(slope * grad.unsqueeze(-1))


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plain, "_kernels", lambda logits: Exact)
    yield
    monkeypatch.undo()


def results() -> list[Tensor]:
    """Values and gradients of the public functions."""
    logits, tokens = example(torch.float32)
    logits = logits.cpu().clamp(min=-1e3).requires_grad_()
    found: list[Tensor] = []
    for value in (F.token_log_probs(logits, tokens.cpu(), 0.7), F.token_entropy(logits, 0.7)):
        weight = torch.linspace(-1, 1, value.numel()).view(value.shape)
        found += [value.detach(), *torch.autograd.grad((value * weight).sum(), logits)]
    slope = logits.detach().clone()
    return [*found, plain.log_probs_and_gradient(slope, tokens.cpu(), 0.7), slope]


def test_the_functions_take_the_kernels_numbers(with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results()
    monkeypatch.undo()
    for ours, expected in zip(found, results(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_kernels_that_do_not_work_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain._checked_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "rl_modules.fast.softmax_kernels", None)
    monkeypatch.delattr(fast, "softmax_kernels", raising=False)
    with pytest.warns(UserWarning, match="by torch's operators: Triton's kernels do not work on cuda here"):
        assert plain._checked_kernels(torch.device("cuda"), torch.bfloat16, 9) is None
    plain._checked_kernels.cache_clear()
