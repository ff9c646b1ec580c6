"""The output layer and the softmax behind it by tiles of tokens, computed again in the backward pass.

With a vocabulary of 150,000 words the logits of a batch are its largest tensor, and their gradient is as large. By
tiles, no more than one tile of either exists at a time, whatever the size of the batch (Hsu et al. 2024,
arXiv:2410.10989, section 3.2; here with log-probabilities for an output, so that any loss may follow).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_modules import functional as F
from rl_modules.language.models import text_config

#: Elements of a tile's logits, and of all logits from which on they are tiled. CPU: 64 and 128 MB of float32.
TILE = {"cpu": 2**24, "accelerator": 2**28}
TILED_ABOVE = {"cpu": 2**25, "accelerator": 2**29}
#: What a model does to the output layer's numbers.
Tail = Callable[[Tensor], Tensor]
_tails: WeakKeyDictionary[nn.Module, Tail] = WeakKeyDictionary()


class TokenStatistics(NamedTuple):
    """What is known of m tokens without their logits."""

    #: log π in nats, [1, m] float32.
    log_prob: Tensor
    #: H in nats, [1, m] float32, without gradient; None where not asked for.
    entropy: Tensor | None
    #: Whether a token is the likeliest, [1, m] bool; None where not asked for.
    is_likeliest: Tensor | None


def is_large(tokens: int, model: Any) -> bool:
    """Whether the logits of so many tokens are worth tiling."""
    elements = tokens * text_config(model.config).vocab_size
    return elements > TILED_ABOVE[_device(model)]


def statistics(
    logits: Tensor, target: Tensor, temperature: float = 1.0, entropy: bool = False, accuracy: bool = False
) -> TokenStatistics:
    """What is known of tokens from their logits.

    Args:
        logits: [1, m, V].
        target: the tokens, [1, m].
        temperature: T, the one that the tokens were sampled with.
        entropy: also the entropies.
        accuracy: also whether each is the likeliest.
    """
    log_prob = F.token_log_probs(logits, target, temperature)
    constant = logits.detach()
    spread = F.token_entropy(constant, temperature) if entropy else None
    return TokenStatistics(log_prob, spread, constant.argmax(-1) == target if accuracy else None)


def tiled_statistics(
    model: Any, states: Tensor, target: Tensor, temperature: float = 1.0, entropy: bool = False, accuracy: bool = False
) -> TokenStatistics:
    """:func:`statistics` from what the output layer reads, with one tile of logits at a time.

    Args:
        model: causal language model whose :func:`tail` is known.
        states: inputs of the output layer, [1, m, D].
        target: the tokens, [1, m].
        temperature: T.
        entropy: also the entropies.
        accuracy: also whether each is the likeliest.
    """
    head, tail = model.get_output_embeddings(), _tails[model]

    def tile(states: Tensor, target: Tensor) -> TokenStatistics:
        return statistics(tail(head(states)), target, temperature, entropy, accuracy)

    rows = max(1, TILE[_device(model)] // text_config(model.config).vocab_size)
    parts = [
        checkpoint(tile, *part, use_reentrant=False) if torch.is_grad_enabled() else tile(*part)
        for part in zip(states.split(rows, 1), target.split(rows, 1), strict=True)
    ]
    log_prob, spread, likeliest = zip(*parts, strict=True)
    return TokenStatistics(
        torch.cat(log_prob, 1), torch.cat(spread, 1) if entropy else None, torch.cat(likeliest, 1) if accuracy else None
    )


def find_tail(model: Any, output: Tensor, logits: Tensor) -> bool:
    """Find out what a model does to its output layer's numbers, from an example; False: it can't be told.

    Nothing, a factor or divisor (Granite, Cohere) or a soft cap (Gemma-2), any of which is a number in its config.

    Args:
        model: causal language model.
        output: of the output layer.
        logits: of the model, for the same tokens.
    """
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    if any(True for _ in network.parameters(recurse=False)):
        return False  # a weight of the model's own may be behind the output layer
    for tail in _tails_of(text_config(model.config)):
        found = tail(output)
        error = (found.float() - logits.float()).abs().max()
        if found.shape == logits.shape and bool(error <= 1e-6 * logits.float().abs().max()):
            _tails[model] = tail
            return True
    return False


def _tails_of(config: Any) -> list[Tail]:
    """Everything that a number of a config could mean for logits."""
    numbers = {float(value) for value in config.to_dict().values() if isinstance(value, float | int) and value}
    scaled: list[Tail] = [lambda z: z]
    for c in sorted(numbers):
        scaled += [lambda z, c=c: z * c, lambda z, c=c: z / c, lambda z, c=c: torch.tanh(z / c) * c]  # type: ignore[misc]
    return scaled


def _device(model: Any) -> str:
    return "cpu" if next(model.parameters()).device.type == "cpu" else "accelerator"
