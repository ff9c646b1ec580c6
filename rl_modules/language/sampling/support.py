"""The tokens that a sampler's filters kept, and logits of training among the same tokens.

Log-probabilities of filtered sampling are those of π restricted to the kept tokens K_t,

    log π_K(y_t) = z_t(y_t) / T - log Σ_{v in K_t} exp(z_t(v) / T),

with logits z after the repetition penalty. K_t is that of sampling, as "Keep Sampling Mask" of DeepSeek-V3.2
(arXiv:2512.02556, section 3.3) has it, so that equal weights give equal probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_modules.language.sampling.protocol import Completions

#: Changes logits [1, n, V] of some tokens, which the slice chooses among all that it was made for.
Process = Callable[[Tensor, slice], Tensor]


def packed(row: Tensor, step: Tensor, count: Tensor, ids: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Lists of kept tokens, of B completions with up to L tokens, the ``shape``: those of each completion one after the
    other, [B, N] int32, and their lengths, [B, L] int32; from n lists, of token ``step`` of completion ``row`` with
    ``count`` elements in ``ids``.
    """
    counts = torch.zeros(shape, dtype=torch.int32, device=ids.device)
    counts[row, step] = count.to(torch.int32)
    end = counts.cumsum(1)
    begin = (end - counts)[row, step]
    of, within = _places(count)
    kept = torch.zeros((shape[0], int(end[:, -1].max())), dtype=torch.int32, device=ids.device)
    kept[row[of], begin[of] + within] = ids.to(torch.int32)
    return kept, counts


def packed_lists(rows: Sequence[Sequence[Sequence[int]]], width: int) -> tuple[Tensor, Tensor]:
    """:func:`packed` of lists on the host, one per token of each completion."""
    place = [(i, j, len(ids)) for i, row in enumerate(rows) for j, ids in enumerate(row)]
    row, step, count = torch.tensor(place, dtype=torch.int64).T
    ids = torch.tensor([token for row in rows for ids in row for token in ids], dtype=torch.int64)
    return packed(row, step, count, ids, (len(rows), width))


def kept_lists(written: Completions) -> list[list[list[int]]] | None:
    """The lists of every completion; None: the sampler returned none."""
    if written.kept is None or written.kept_count is None:
        return None
    columns = written.kept.tolist(), written.kept_count.tolist(), written.kept_count.cumsum(1).tolist()
    return [
        [kept[end - count : end] for count, end in zip(counts, ends, strict=True)]
        for kept, counts, ends in zip(*columns, strict=True)
    ]


def _places(count: Tensor) -> tuple[Tensor, Tensor]:
    """Of all elements of lists of these lengths: the number of the list, and the place in it."""
    of = torch.arange(len(count), device=count.device).repeat_interleave(count)
    return of, torch.arange(len(of), device=count.device) - (count.cumsum(0) - count)[of]


@dataclass(frozen=True)
class Filter:
    """How sampling changed the distribution of b completions' tokens, beside the temperature."""

    repetition_penalty: float
    #: See :func:`packed`; None: all tokens were kept, or it is not known which.
    kept: Tensor | None
    kept_count: Tensor | None

    def __getitem__(self, rows: Tensor) -> Filter:
        if self.kept is None or self.kept_count is None:
            return self
        return Filter(self.repetition_penalty, self.kept[rows], self.kept_count[rows])

    def at(self, tokens: Tensor, prompt_length: Tensor, row: Tensor, column: Tensor) -> Process:
        """What makes logits of n tokens, at ``column`` of a ``row``'s completion, those that sampling drew from."""
        first: list[Tensor] = []

        def process(logits: Tensor, part: slice) -> Tensor:
            r, c, words = row[part], column[part], logits.shape[-1]
            if (penalty := self.repetition_penalty) != 1:
                first[:] = first or [_first_place(tokens, words)]
                seen = first[0][r] < (prompt_length[r] + c).unsqueeze(1)
                logits = logits.float()
                penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
                logits = torch.where(seen, penalized, logits)
            if self.kept is not None and self.kept_count is not None:
                count = self.kept_count[r, c]
                begin = self.kept_count.cumsum(1)[r, c] - count
                of, within = _places(count)
                # Where nothing was drawn, as in what a dialogue's model reads, no list was written.
                left_out = (count > 0).unsqueeze(1).expand(-1, words + 1).clone()
                # The sampler's vocabulary may have been padded to more words, all of which the last column stands for.
                left_out[of, self.kept[r[of], begin[of] + within].long().clamp(max=words)] = False
                logits = logits.masked_fill(left_out[:, :words], -torch.inf)
            return logits

        return process


def _first_place(tokens: Tensor, words: int) -> Tensor:
    """The first place of each word in each row, [b, words]; the row's width where it is not there."""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    nowhere = torch.full((len(tokens), words), tokens.shape[1], device=tokens.device)
    return nowhere.scatter_reduce(1, tokens, place, "amin")
