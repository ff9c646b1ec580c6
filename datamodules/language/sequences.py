"""Batches of tokenized texts: padded to the longest, or several packed into a row; prompts before completions."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

Ids = Sequence[Sequence[int]]


class _Pieces:
    """Lists of token ids as one flat tensor, from which rows are laid out without a loop over tokens."""

    def __init__(self, pieces: Sequence[Sequence[int]]) -> None:
        self.size = torch.tensor([len(piece) for piece in pieces], dtype=torch.long)
        self.tokens = torch.tensor(list(chain.from_iterable(pieces)), dtype=torch.int32)
        self._start = self.size.cumsum(0) - self.size

    def lay(self, numbers: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lays pieces out at ``starts``; of each token its piece, place in the piece, place in ``tokens``, and goal."""
        size = self.size[numbers]
        owner = torch.arange(len(numbers)).repeat_interleave(size)
        within = torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
        return owner, within, self._start[numbers][owner] + within, starts[owner] + within


class Sequences:
    """Prompts with completions as token ids; all tokens but the first count, or those of the ``masks``."""

    def __init__(
        self,
        prompts: Ids,
        completions: Ids,
        completion_only: bool,
        masks: Sequence[Sequence[bool] | None] | None = None,
    ) -> None:
        self._pieces = _Pieces([[*p, *c] for p, c in zip(prompts, completions, strict=True)])
        #: Tokens of each sequence, [n].
        self.total = self.longest = self._pieces.size
        first = torch.tensor([len(p) for p in prompts], dtype=torch.long)
        self._first = first if completion_only else torch.ones_like(self.total)
        #: Tokens of each sequence that count, [n].
        self.counted = self.total - self._first
        #: Whether each token counts, where completions have a mask of their own.
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
        """Sequences as rows of equal width, with ``packing`` several to a row: ``tokens`` [rows, width], ``counted``
        [m] (places in ``tokens.flatten()``), ``filled`` [rows] and, packed, ``position_ids`` [rows, width] that begin
        again at 0, and ``boundaries`` [n + 1], the places where they do and the number of places.
        """
        total = self.total[index]
        width = int(total.max())
        if packing:
            row, column = pack(total.tolist(), width)
        else:
            row, column = torch.arange(len(index)), torch.zeros_like(total)
        owner, within, source, place = self._pieces.lay(index, row * width + column)
        rows = int(row.max()) + 1
        tokens = torch.full((rows * width,), pad_id)
        tokens[place] = self._pieces.tokens[source].long()
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
            start = row * width + column
            batch["boundaries"] = torch.cat([start, start + total, torch.tensor([len(tokens)])]).unique().int()
        return batch


class Pairs:
    """Prompts, chosen and rejected answers as token ids, of which batches are made."""

    def __init__(self, prompts: Ids, chosen: Ids, rejected: Ids) -> None:
        # In order: prompt, chosen and rejected answer of each pair.
        self._pieces = _Pieces([piece for pair in zip(prompts, chosen, rejected, strict=True) for piece in pair])
        self.tokens = self._pieces.tokens
        #: Tokens of prompt, chosen and rejected answer, [n, 3].
        self.lengths = self._pieces.size.view(-1, 3)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> Tensor:
        """Tokens of the longer of both sequences, prompt included, [n]."""
        return self.lengths[:, 0] + self.lengths[:, 1:].amax(-1)

    @property
    def total(self) -> Tensor:
        """Tokens of both sequences together, the prompt counted twice, [n]."""
        return 2 * self.lengths[:, 0] + self.lengths[:, 1] + self.lengths[:, 2]

    def batch(self, index: Tensor, packing: bool) -> dict[str, Tensor]:
        """Pairs as rows, the chosen answers first, or with ``packing`` several to a row, each with its prompt once.

        The fields are those of ``rl_modules.language.contract.PairBatch`` from ``tokens`` to ``prompt_segment``.
        """
        lengths, b = self.lengths[index], len(index)
        if packing:
            total = lengths.sum(-1)
            width = int(total.max())
            row, column = pack(total.tolist(), width)
            # Pieces in the order of the pair: prompt, chosen, rejected.
            piece = torch.arange(3).repeat(b)
            pair = torch.arange(b).repeat_interleave(3)
            start = (row * width + column).repeat_interleave(3) + (lengths.cumsum(-1) - lengths).flatten()
            rows = int(row.max()) + 1
            end = start.view(b, 3) + lengths - 1
            last = torch.cat([end[:, 1], end[:, 2]])
        else:
            width = int(self.longest[index].max())
            # Pieces in the order of the rows: prompt and chosen b times, then prompt and rejected b times.
            piece = torch.cat([torch.tensor([0, 1]).repeat(b), torch.tensor([0, 2]).repeat(b)])
            pair = torch.arange(b).repeat_interleave(2).repeat(2)
            rows = 2 * b
            start = torch.arange(rows).repeat_interleave(2) * width + torch.where(piece > 0, lengths[pair, 0], 0)
            last = start[1::2] + lengths[pair, piece][1::2] - 1
        owner, within, source, place = self._pieces.lay(3 * index[pair] + piece, start)
        tokens = torch.zeros(rows * width, dtype=torch.long)
        tokens[place] = self.tokens[source].long()
        batch = {"tokens": tokens.view(rows, width), "last": last, "lengths": lengths}
        if packing:
            # Both answers start where the prompt ends.
            position = torch.where(piece > 0, lengths[pair, 0], 0)[owner] + within
            for name, values, filler in (
                ("position_ids", position, 0),
                ("segment", owner, -1),
                ("prompt_segment", 3 * pair[owner], -1),
            ):
                filled = torch.full((rows * width,), filler)
                filled[place] = values
                batch[name] = filled.view(rows, width)
        return batch

    def work(self, index: Tensor, packing: bool, hidden_size: int) -> float:
        """Work of a pass in tokens: its places, and 1 for every 8 · ``hidden_size`` pairs of places in attention."""
        if packing:
            total = self.lengths[index].sum(-1)
            width = int(total.max())
            rows, compared = int(pack(total.tolist(), width)[0].max()) + 1, float(width)
        else:
            width = int(self.longest[index].max())
            rows, compared = 2 * len(index), width / 2
        return rows * width * (1 + compared / (8 * hidden_size))


def pack(lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Row and first column of each of n sequences, laid into as few rows of a width as best-fit decreasing finds: at
    most 11/9 of the fewest possible, and one.

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
