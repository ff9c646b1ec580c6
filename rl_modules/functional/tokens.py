"""Log-probabilities and entropies of tokens, without a second tensor of the size of the logits.

With a vocabulary of 150,000 words the logits are by far the largest tensor of a training step, and a log-softmax
over them would be another one, kept for the backward pass. Both functions here work through the logits in pieces
that fit into the processor's cache, keep one number per token, and recompute the rest in the backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_modules.fast import is_fast
from rl_modules.functional.checks import as_float, require_positive, require_shape, require_tensors

# Elements per piece. On a CPU: half a megabyte of float32, which stays in the second-level cache from one kernel to
# the next. On a GPU: 64 MB, enough to keep it busy, little beside the logits of one batch.
_PIECE_CPU = 2**17
_PIECE_GPU = 2**24
# Stands for the log-probability of an excluded token. Its exponential is 0 in float64, and its products with any
# gradient are finite, so that 0 times them is 0.
_NEVER = -1e4


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of each token under the softmax of its own logits.

    log π(y_t) = z_{t, y_t} - log Σ_v exp(z_{t, v}),   z = logits / T

    Tokens are not shifted: ``logits[b, t]`` predicts ``tokens[b, t]``. A causal model's logits at position t
    predict the token at t + 1, so pass ``logits[:, :-1]`` with ``tokens[:, 1:]``; the slice is not copied.

    Args:
        logits: shape (B, L, V), or (L, V), or with more leading dimensions. Receives gradient; the backward pass
            allocates the gradient and one small chunk. Logits of -inf mark excluded tokens.
        tokens: indices in [0, V), shape (B, L), also under padding, where any valid index is allowed (mask the result).
        temperature: T, as used in sampling, above 0.

    Returns:
        log π(y) in nats, shape (B, L), float32 even for bfloat16 logits (float64 for float64): the ratio of two
        policies is the exponential of a difference of these, and bfloat16 has only three digits.

    Raises:
        ValueError: logits has fewer than two dimensions, tokens does not have the shape of logits without V, or
            temperature is not positive.

    Source: the definition of the softmax; temperature in the ratio: Huang et al. 2024, arXiv:2403.17031, section 7.
    """
    whole = _checked(logits)
    require_shape("tokens", tokens, logits.shape[:-1], "logits without its last dimension")
    require_positive("temperature", temperature)
    if torch.compiler.is_compiling():  # The compiler fuses this; our pieces would only lengthen its graph.
        scaled = as_float(logits) / temperature
        return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)
    return _TokenLogProbs.apply(whole, tokens.reshape(whole.shape[:-1]), temperature).view(tokens.shape)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy of the distribution from which each token was drawn.

    H_t = -Σ_v p_{t, v} log p_{t, v},   p = softmax(logits / T)

    Args:
        logits: shape (B, L, V), or (L, V), or with more leading dimensions; receives gradient. Logits of -inf mark
            excluded tokens and contribute 0.
        temperature: T, as used in sampling, above 0.

    Returns:
        H in nats, in [0, log V], shape (B, L), float32 even for bfloat16 logits (float64 for float64).

    Raises:
        ValueError: logits has fewer than two dimensions, or temperature is not positive.

    Source: Shannon 1948, section 6.
    """
    whole = _checked(logits)
    require_positive("temperature", temperature)
    if torch.compiler.is_compiling():
        log_prob = torch.log_softmax(as_float(logits) / temperature, -1)
        return -(log_prob.exp() * log_prob.clamp(min=_NEVER)).sum(-1)
    return _TokenEntropy.apply(whole, temperature).view(logits.shape[:-1])


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        ctx.temperature = temperature
        if (kernels := _kernels(logits)) is not None:
            log_prob, normaliser, _ = kernels.token_statistics(logits, tokens, temperature)
            ctx.save_for_backward(logits, tokens, normaliser.unsqueeze(-1))
            return log_prob
        largest, log_total = _log_total(logits, temperature)
        # The maximum goes first: beside large logits the logarithm of the sum would lose its digits.
        chosen = as_float(logits.gather(-1, tokens.unsqueeze(-1))) - largest
        ctx.save_for_backward(logits, tokens, log_total + largest / temperature)
        return (chosen / temperature - log_total).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """∂ log π(y) / ∂ logits_v = ([v = y] - p_v) / T."""
        logits, tokens, normaliser = ctx.saved_tensors
        result = torch.empty_like(logits)
        return token_log_probs_gradient(logits, tokens, normaliser, grad, ctx.temperature, out=result), None, None


def token_log_probs_gradient(
    logits: Tensor, tokens: Tensor, normaliser: Tensor, grad: Tensor, temperature: float, out: Tensor
) -> Tensor:
    """The gradient of :func:`token_log_probs` with respect to the logits, for callers that recompute the logits.

    Logits are [B, L, V], tokens and the log-probabilities' ``grad`` [B, L], and the normaliser log Σ_v exp(z_v / T)
    [B, L, 1]. The result is written to ``out``, which may be the logits.
    """
    if (kernels := _kernels(logits)) is not None:
        return kernels.log_probs_gradient(logits, tokens, normaliser, grad, temperature, out)
    factor = (grad / temperature).unsqueeze(-1)
    for scratch, piece, result, normaliser_piece, token, weight in _pieces(
        logits, out, normaliser, tokens.unsqueeze(-1), factor
    ):
        probability = _log_softmax(piece, scratch, normaliser_piece, temperature).exp_()
        chosen = probability.gather(-1, token) * -weight + weight
        torch.mul(probability, -weight, out=result).scatter_(-1, token, chosen.to(result.dtype))
    return out


def log_probs_and_gradient(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """:func:`token_log_probs`, [B, L]; puts the gradient of their sum in place of the logits, [B, L, V]."""
    if (kernels := _kernels(logits)) is not None:
        return kernels.token_statistics(logits, tokens, temperature, in_place=True)[0]
    found = _room(logits)
    for scratch, piece, found_piece, token in _pieces(logits, found, tokens.unsqueeze(-1)):
        largest = _room(piece)
        weight = _shifted(piece, scratch, largest, temperature).exp_()
        total = weight.sum(-1, keepdim=True)
        chosen = as_float(piece.gather(-1, token)) - largest
        found_piece.copy_(chosen / temperature - total.log())
        slope = (1 - weight.gather(-1, token) / total) / temperature
        torch.mul(weight, -1 / (total * temperature), out=piece).scatter_(-1, token, slope.to(piece.dtype))
    return found.squeeze(-1)


class _TokenEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        ctx.temperature = temperature
        if (kernels := _kernels(logits)) is not None:
            nothing = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
            _, normaliser, entropy = kernels.token_statistics(logits, nothing, temperature, entropy=True)
            ctx.save_for_backward(logits, normaliser.unsqueeze(-1), entropy.unsqueeze(-1))
            return entropy
        total, largest, mean = _room(logits), _room(logits), _room(logits)
        for scratch, piece, total_piece, largest_piece, mean_piece in _pieces(logits, total, largest, mean):
            shifted = _shifted(piece, scratch, largest_piece, temperature)
            shifted.clamp_(min=_NEVER)
            weight = shifted.exp()
            torch.sum(weight, -1, keepdim=True, out=total_piece)
            torch.sum(weight.mul_(shifted), -1, keepdim=True, out=mean_piece)
        entropy = total.log() - mean / total
        ctx.save_for_backward(logits, total.log_().add_(largest.div_(temperature)), entropy)
        return entropy.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """∂H / ∂ logits_v = -p_v (log p_v + H) / T."""
        logits, normaliser, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        factor = (grad / -ctx.temperature).unsqueeze(-1)
        for scratch, piece, result_piece, normaliser_piece, entropy_piece, weight in _pieces(
            logits, result, normaliser, entropy, factor
        ):
            log_prob = _log_softmax(piece, scratch, normaliser_piece, ctx.temperature)
            log_prob.clamp_(min=_NEVER)
            probability = log_prob.exp()
            result_piece.copy_(log_prob.add_(entropy_piece).mul_(weight).mul_(probability))
        return result, None


def _kernels(logits: Tensor) -> Any:
    """The module of kernels, on a GPU where they take these logits."""
    takes = logits.is_cuda and logits.stride(-1) == 1 and logits.dtype is not torch.float64
    return _checked_kernels(logits.device, logits.dtype, logits.shape[-1]) if takes and is_fast() else None


@cache
def _checked_kernels(device: torch.device, dtype: torch.dtype, words: int) -> Any:
    """The same, once they have given float64's numbers for so many words; a warning says why they do not."""
    try:
        from rl_modules.fast import softmax_kernels

        softmax_kernels.require_exact(device, dtype, words)
        return softmax_kernels
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"log-probabilities of tokens are computed by torch's operators: Triton's kernels do not work on "
            f"{device.type} here ({reason})",
            stacklevel=2,
        )
        return None


def _checked(logits: Tensor) -> Tensor:
    """Shape (B, L, V), without a copy unless there are more than three dimensions, laid out with gaps."""
    require_tensors(logits=logits)
    if logits.ndim < 2:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}, expected at least 2 dimensions, [B, L, V] or [L, V]."
        )
    return logits.unsqueeze(0) if logits.ndim == 2 else logits.flatten(0, -3)


def _room(logits: Tensor) -> Tensor:
    """Room for one number per token, shape (B, L, 1), in the precision in which we compute."""
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return torch.empty((*logits.shape[:-1], 1), dtype=dtype, device=logits.device)


def _pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of shape (B, L, ...) alike into blocks that are small enough for the logits among them.

    Yields room to compute on such a block of logits, then the blocks: views, also of logits that are not contiguous.
    """
    batch, length, words = logits.shape
    size = _PIECE_CPU if logits.device.type == "cpu" else _PIECE_GPU
    rows = max(1, size // max(1, length * words))
    columns = max(1, length if length * words <= size else size // words)
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    room = torch.empty((min(rows, batch), min(columns, length), words), dtype=dtype, device=logits.device)
    for block in zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True):
        for piece in zip(*(tensor.split(columns, 1) for tensor in block), strict=True):
            height, width = piece[0].shape[:2]
            yield room[:height, :width], *piece


def _log_total(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A bound m on the logits of each row, and log Σ exp((logits - m) / T), both of shape (B, L, 1).

    Taking the maximum for m keeps every exponential below 1, but finding and subtracting it are two passes of five.
    Logits of a model hardly ever need it. On a CPU, where a look at the result costs nothing, we first do without.
    """
    total, largest = _room(logits), _room(logits)
    if logits.device.type == "cpu":
        for scratch, piece, total_piece in _pieces(logits, total):
            source = _source(piece, scratch)
            source = source if temperature == 1.0 else torch.div(source, temperature, out=scratch)
            torch.sum(torch.exp(source, out=scratch), -1, keepdim=True, out=total_piece)
        # Neither overflow, nor lost small terms, nor a logarithm so large that float32 rounds it by more than 3e-6.
        if bool(((total > 1e-20) & (total < 1e20)).all()):
            return largest.zero_(), total.log_()
    for scratch, piece, total_piece, largest_piece in _pieces(logits, total, largest):
        shifted = _shifted(piece, scratch, largest_piece, temperature)
        torch.sum(shifted.exp_(), -1, keepdim=True, out=total_piece)
    return largest, total.log_()


def _source(logits: Tensor, scratch: Tensor) -> Tensor:
    """Logits for an operator whose other operand is float32: a GPU's reads bfloat16 as well, a CPU's would be slow."""
    return logits if logits.dtype is scratch.dtype or not logits.is_cpu else scratch.copy_(logits)


def _shifted(logits: Tensor, scratch: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Write (logits - max) / T into scratch, and max into largest: exponentials of these cannot overflow."""
    source = _source(logits, scratch)
    largest.copy_(source.amax(-1, keepdim=True))
    shifted = torch.sub(source, largest, out=scratch)
    return shifted if temperature == 1.0 else shifted.div_(temperature)


def _log_softmax(logits: Tensor, scratch: Tensor, normaliser: Tensor, temperature: float) -> Tensor:
    """Write log p = logits / T - log Σ exp(logits / T) into scratch."""
    if temperature == 1.0:
        return torch.sub(_source(logits, scratch), normaliser, out=scratch)
    return scratch.copy_(logits).div_(temperature).sub_(normaliser)
