"""The distribution that a next token is drawn from, and the draw itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.fast import is_fast
from rl_modules.language.fast.block_draw import draw_by_blocks


@dataclass(frozen=True)
class NextToken:
    """Processing of logits before a token is drawn, in transformers' order and with its meaning."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k is None or self.top_k >= 0, "1 or more, or None for all tokens"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "in (0, 1], or None for all tokens"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1], or None for all tokens"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise UsageError(f"{name}={getattr(self, name)} must be {expected}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens may have probability 0."""
        cuts = bool(self.top_k) or (self.top_p or 1) < 1 or bool(self.min_p)
        return cuts and self.temperature > 0

    def draw(self, logits: Tensor, uniform: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token per row, by inverting the cumulative distribution."""
        return self.draw_from(self.scores(logits, seen), uniform)

    def draw_from(self, scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row of :meth:`scores`, and its log-probability."""
        if self.temperature == 0:
            token = scores.argmax(-1)
            highest = scores.gather(-1, token.unsqueeze(-1)).squeeze(-1)
            return token, torch.where(highest.isnan(), highest, 0.0).float()  # the caller reports NaN
        if is_fast() and not scores.is_cpu:
            return draw_by_blocks(scores, uniform)
        shifted = scores - scores.amax(-1, keepdim=True).float()
        # In float64 the sum over a vocabulary of any size is exact enough for a draw's 52 bits to reach every token.
        cumulative = shifted.exp().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        token = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * total, right=True)
        token.clamp_(max=scores.shape[-1] - 1)  # Only NaN logits get past the end; the caller reports them.
        log_prob = shifted.gather(-1, token) - total.log()
        return token.squeeze(-1), log_prob.squeeze(-1).float()

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The logarithms of the probabilities up to a constant, (B, V); -inf for what can't be drawn.

        They are float32; a GPU's logits that nothing changes stay as they are.
        """
        if not logits.is_cpu and self.temperature in (0, 1) and self.repetition_penalty == 1 and not self.truncates:
            return logits
        scores = logits.float()
        if self.repetition_penalty != 1:
            if seen is None:
                raise ValueError("seen is None, expected a mask of the tokens that each row has, for the penalty.")
            penalized = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = torch.where(seen, penalized, scores)
        if self.temperature == 0:
            return scores
        if self.temperature != 1.0:
            scores = scores / self.temperature
        if self.top_k and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = scores.sort(-1, descending=True)
            probability = ordered.softmax(-1)
            before = probability.cumsum(-1) - probability  # 0 for the likeliest token, which always stays
            scores = scores.masked_fill((before >= self.top_p).scatter(-1, order, before >= self.top_p), -torch.inf)
        if self.min_p:
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(self.min_p), -torch.inf)
        return scores


def uniforms(seeds: Sequence[int] | Tensor, steps: int) -> Tensor:
    """Returns numbers in [0, 1) that depend only on a row's seed and the step: one stream per row, whatever the batch.

    Source: Steele et al. 2014, "Fast splittable pseudorandom number generators", OOPSLA, with Stafford's constants 13.
    """
    listed = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    start = _mix(np.array([int(seed) % 2**64 for seed in listed], dtype=np.uint64) + _GOLDEN)
    counter = np.arange(1, steps + 1, dtype=np.uint64)[:, None] * _GOLDEN
    return torch.from_numpy((_mix(start + counter) >> np.uint64(12)).astype(np.float64) * 2.0**-52)


def mixed(seed: int) -> int:
    """Another seed, below 2⁶³, whose low 32 bits depend on all bits: torch's CPU generator reads no others."""
    return int(_mix(np.array([seed % 2**64], dtype=np.uint64))[0]) % 2**63


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ divided by the golden ratio, odd: the counter visits all 2⁶⁴ states.


def _mix(state: np.ndarray) -> np.ndarray:
    """Applies a bijection of 64-bit words in which every bit of the result depends on every bit of the argument."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
