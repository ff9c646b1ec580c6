"""Batches of tokenized texts: padded to the longest, or several packed into a row; prompts before completions."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Sequences:
    """Prompts with completions as one flat tensor, from which batches are cut without a loop over tokens.

    Args:
        prompts: n lists of token ids, none empty.
        completions: n lists of token ids.
        completion_only: completions alone count in the loss; False: every token but a sequence's first, which nothing
            predicts.
        masks: per sequence which tokens of its completion count, or None: all of them. Read with ``completion_only``.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        completion_only: bool,
        masks: Sequence[Sequence[bool] | None] | None = None,
    ) -> None:
        joined = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        #: Tokens of each sequence, [n].
        self.total = torch.tensor([len(ids) for ids in joined])
        self._tokens = torch.tensor([token for ids in joined for token in ids])
        self._start = self.total.cumsum(0) - self.total
        self._first = torch.tensor([len(p) for p in prompts]) if completion_only else torch.ones_like(self.total)
        #: Tokens of each sequence that count, [n].
        self.counted = self.total - self._first
        #: Whether each of ``_tokens`` counts, where completions have a mask of their own.
        self._counts: Tensor | None = None
        if completion_only and masks is not None and any(mask is not None for mask in masks):
            counts = [
                flag
                for p, c, mask in zip(prompts, completions, masks, strict=True)
                for flag in [False] * len(p) + (list(mask) if mask is not None else [True] * len(c))
            ]
            self._counts = torch.tensor(counts)
            self.counted = torch.stack([part.sum() for part in self._counts.split(self.total.tolist())])

    def __len__(self) -> int:
        return len(self.total)

    def batch(self, index: Tensor, pad_id: int, packing: bool = False) -> dict[str, Tensor]:
        """Some of the sequences as rows of equal width.

        Args:
            index: which ones, [b].
            pad_id: what fills the rows up.
            packing: several to a row, in rows as wide as the longest of them.

        Returns:
            ``tokens`` [rows, width]; ``counted`` [m], the places in ``tokens.flatten()`` of the tokens that count;
            ``filled`` [rows], the tokens of each row before its padding; where packed also ``position_ids``
            [rows, width], which begin again at 0 where a sequence begins.
        """
        total = self.total[index]
        width = int(total.max())
        if packing:
            row, column = pack(total.tolist(), width)
        else:
            row, column = torch.arange(len(index)), torch.zeros_like(total)
        owner = torch.arange(len(index)).repeat_interleave(total)
        within = torch.arange(len(owner)) - (total.cumsum(0) - total)[owner]
        place = (row * width + column)[owner] + within
        rows = int(row.max()) + 1
        tokens = torch.full((rows * width,), pad_id)
        source = self._start[index][owner] + within
        tokens[place] = self._tokens[source]
        counts = within >= self._first[index][owner] if self._counts is None else self._counts[source]
        batch = {
            "tokens": tokens.view(rows, width),
            "counted": place[counts],
            "filled": torch.zeros(rows, dtype=torch.long).index_add_(0, row, total),
        }
        if packing:
            # Each pad token is at position 0 too: a separate sequence, to which no other token attends.
            position = torch.zeros_like(tokens)
            position[place] = within
            batch["position_ids"] = position.view(rows, width)
        return batch


def pack(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Lays sequences into as few rows as best-fit decreasing finds.

    Args:
        lengths: n of them, each at most ``width``.
        width: room of a row.

    Returns:
        Row and first column of each sequence, [n] each. At most 11/9 of the fewest possible rows, and one.

    Source: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms".
    """
    row, column = [0] * len(lengths), [0] * len(lengths)
    free: list[tuple[int, int]] = []  # (room left, row), ascending
    rows = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[i], -1))
        if at < len(free):
            room, row[i] = free.pop(at)
        else:
            room, row[i] = width, rows
            rows += 1
        column[i] = width - room
        insort(free, (room - lengths[i], row[i]))
    return torch.tensor(row), torch.tensor(column)


def joined_sequences(prompts: list[list[int]], written: Any, num_generations: int, pad_id: int) -> dict[str, Tensor]:
    """Prompts and their completions as one right-padded sequence each.

    Args:
        prompts: P lists of token ids.
        written: the sampler's ``Completions`` of P · num_generations rows.
        num_generations: completions per prompt.
        pad_id: fills the columns after the end.

    Returns:
        ``tokens`` [B, T], ``prompt_length`` [B], ``length`` [B].
    """
    device = written.tokens.device
    prompt_length = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(num_generations)
    width = int((prompt_length + written.length).max())
    tokens = torch.full((len(prompt_length), width), pad_id, dtype=torch.long, device=device)
    longest = max(len(p) for p in prompts)
    padded = torch.tensor([p + [pad_id] * (longest - len(p)) for p in prompts], device=device)
    tokens[:, :longest] = padded.repeat_interleave(num_generations, 0)[:, :width]
    row, column = written.mask.nonzero(as_tuple=True)
    tokens[row, prompt_length[row] + column] = written.tokens[row, column]
    return {"tokens": tokens, "prompt_length": prompt_length, "length": written.length}
