"""Log-probabilities of tokens and their gradient on a GPU, by kernels of Triton that read the logits once or twice.

The plain twins, :mod:`rl_modules.functional.tokens`, take a dozen operators for each piece of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits,
    token,
    log_prob,
    normaliser,
    entropy,
    batch_stride,
    stride,
    length,
    temperature,
    WORDS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum and sum of a row in one pass (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3)."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + (row // length) * batch_stride + (row % length) * stride
    chosen_word = tl.load(token + row)
    is_word = (chosen_word >= 0) & (chosen_word < WORDS)
    chosen = tl.load(z + chosen_word, mask=is_word, other=float("nan")).to(tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mean = tl.full((), 0.0, tl.float32)
    for begin in range(0, WORDS, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(z + column, mask=column < WORDS, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(x, 0))
        by = tl.where(largest == float("-inf"), 0.0, (largest - above) / temperature)
        shifted = (x - tl.where(above == float("-inf"), 0.0, above)) / temperature
        weight = tl.exp(shifted)
        if WITH_ENTROPY:
            moment = tl.sum(tl.where(weight == 0.0, 0.0, weight * shifted), 0)
            mean = (mean + total * by) * tl.exp(by) + moment
        total = total * tl.exp(by) + tl.sum(weight, 0)
        largest = above
    log_total = tl.log(total)
    tl.store(log_prob + row, (chosen - largest) / temperature - log_total)
    tl.store(normaliser + row, log_total + largest / temperature)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_total - mean / total)
    if IN_PLACE:
        for begin in range(0, WORDS, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(z + column, mask=column < WORDS, other=float("-inf")).to(tl.float32)
            probability = tl.exp((x - largest) / temperature) / total
            slope = (tl.where(column == chosen_word, 1.0, 0.0) - probability) / temperature
            tl.store(z + column, slope.to(logits.dtype.element_ty), mask=column < WORDS)


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    logits,
    out,
    token,
    normaliser,
    grad,
    batch_stride,
    stride,
    out_batch_stride,
    out_stride,
    length,
    temperature,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """([v = y] - p_v) / T times the row's gradient."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    place = (row // length) * batch_stride + (row % length) * stride + column
    x = tl.load(logits + place, mask=column < WORDS, other=float("-inf")).to(tl.float32)
    probability = tl.exp(x / temperature - tl.load(normaliser + row))
    is_chosen = tl.where(column == tl.load(token + row), 1.0, 0.0)
    slope = (is_chosen - probability) * (tl.load(grad + row) / temperature)
    place = (row // length) * out_batch_stride + (row % length) * out_stride + column
    tl.store(out + place, slope.to(out.dtype.element_ty), mask=column < WORDS)


def token_statistics(
    logits: Tensor, tokens: Tensor, temperature: float, entropy: bool = False, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's log π and log Σ_v exp(z_v / T), and its entropy or nothing, (B, L) each.

    ``in_place`` puts the gradient of the sum of log π in place of the logits (B, L, V).
    """
    log_prob, normaliser = torch.empty((2, *tokens.shape), dtype=torch.float32, device=logits.device)
    spread = torch.empty_like(log_prob) if entropy else log_prob.new_empty(0)
    _, length, words = logits.shape
    with torch.cuda.device_of(logits):
        _rows[(tokens.numel(),)](
            logits,
            tokens.contiguous(),
            log_prob,
            normaliser,
            spread,
            logits.stride(0),
            logits.stride(1),
            length,
            float(temperature),
            WORDS=words,
            WITH_ENTROPY=entropy,
            IN_PLACE=in_place,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return log_prob, normaliser, spread


def log_probs_gradient(
    logits: Tensor, tokens: Tensor, normaliser: Tensor, grad: Tensor, temperature: float, out: Tensor
) -> Tensor:
    """The gradient of the logits (B, L, V), from that of log π, (B, L); ``out`` may be the logits."""
    _, length, words = logits.shape
    rows = [tokens.contiguous(), normaliser.float().contiguous(), grad.float().contiguous()]
    with torch.cuda.device_of(logits):
        _slopes[(tokens.numel(), triton.cdiv(words, _BLOCK))](
            logits,
            out,
            *rows,
            logits.stride(0),
            logits.stride(1),
            out.stride(0),
            out.stride(1),
            length,
            float(temperature),
            WORDS=words,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out


def require_exact(device: torch.device, dtype: torch.dtype, words: int) -> None:
    """Compares the kernels of a vocabulary with float64.

    Raises:
        ArithmeticError: they give other numbers; what Triton raises where it can't compile.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (9 * torch.randn(1, 3, words, generator=generator)).to(device, dtype)
    tokens = torch.tensor([[0, words // 2, words - 1]], device=device)
    z = logits.double() / 0.7
    log_p = z.log_softmax(-1)
    log_prob = log_p.gather(-1, tokens.unsqueeze(-1))
    slope = (torch.zeros_like(z).scatter_(-1, tokens.unsqueeze(-1), 1.0) - log_p.exp()) / 0.7
    expected = log_prob.squeeze(-1), z.logsumexp(-1), -(log_p.exp() * log_p).sum(-1), slope, slope
    found = token_statistics(logits, tokens, 0.7, entropy=True)
    slopes = log_probs_gradient(logits, tokens, found[1], torch.ones_like(found[0]), 0.7, torch.empty_like(logits))
    token_statistics(logits, tokens, 0.7, in_place=True)
    pairs = zip((*found, slopes, logits), expected, strict=True)
    error = max(float((a - b).abs().max()) for a, b in pairs)
    if not error < (1e-4 if dtype is torch.float32 else 1e-2):
        raise ArithmeticError(f"its numbers differ by {error:.1g}")
