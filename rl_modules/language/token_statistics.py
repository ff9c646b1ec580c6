"""What is computed from the logits of chosen places: log-probabilities, entropies, the likeliest token."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rl_modules import functional as F


class TokenStatistics(NamedTuple):
    """Statistics of m tokens that are kept instead of their logits."""

    #: log π in nats, [1, m] float32.
    log_prob: Tensor
    #: H in nats, [1, m] float32; None where not requested. Without gradient under ``equal_weights``.
    entropy: Tensor | None
    #: Whether a token is the likeliest, [1, m] bool; None where not requested.
    is_likeliest: Tensor | None


def statistics(
    logits: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    accuracy: bool = False,
    log_probs: Callable[[Tensor, Tensor, float], Tensor] = F.token_log_probs,
) -> TokenStatistics:
    """Computes statistics of the tokens ``target`` [1, m] from their logits [1, m, V]; ``log_probs`` is called last."""
    spread = F.token_entropy(logits, temperature) if entropy else None
    is_likeliest = logits.detach().argmax(-1) == target if accuracy else None
    return TokenStatistics(log_probs(logits, target, temperature), spread, is_likeliest)
