"""Batches of tokenized pairs: one row per answer, or both answers after one prompt, with several pairs per row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from datamodules.language.sequences import pack


class Pairs:
    """Prompts, chosen and rejected answers as one flat tensor, from which batches are cut without a loop over tokens.

    Args:
        prompts: n lists of token ids.
        chosen: n lists of token ids, none empty.
        rejected: n lists of token ids, none empty.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        rejected: Sequence[Sequence[int]],
    ) -> None:
        pieces = [piece for pair in zip(prompts, chosen, rejected, strict=True) for piece in pair]
        #: Tokens of prompt, chosen and rejected answer, [n, 3].
        self.lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.long).view(-1, 3)
        #: All pieces in order: prompt, chosen and rejected answer of each pair.
        self.tokens = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int32)
        flat = self.lengths.flatten()
        self._start = (flat.cumsum(0) - flat).view(-1, 3)

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
        """Some of the pairs as rows of equal width.

        Args:
            index: which ones, [b].
            packing: prompt, chosen and rejected answer one after the other, the prompt read once, and several pairs to
                a row, in rows as wide as the longest; False: one row per answer.

        Returns:
            ``tokens`` [rows, width], 0 where nothing stands; ``lengths`` [b, 3], the tokens of each prompt, chosen and
            rejected answer; ``last`` [2b], the places in ``tokens.flatten()`` of each sequence's last token, the
            chosen ones first. Where packed also ``position_ids``, ``segment`` (which piece a
            token belongs to, -1: none) and ``prompt_segment`` (the piece that it reads besides), [rows, width] each.
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
        size = lengths[pair, piece]
        owner = torch.arange(len(piece)).repeat_interleave(size)
        within = torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
        place = start[owner] + within
        tokens = torch.zeros(rows * width, dtype=torch.long)
        tokens[place] = self.tokens[self._start[index[pair], piece][owner] + within].long()
        batch = {"tokens": tokens.view(rows, width), "last": last, "lengths": lengths}
        if packing:
            # Both answers start where the prompt ends.
            position = torch.where(piece > 0, lengths[pair, 0], 0)[owner] + within
            for name, values, filler in (
                ("position_ids", position, 0), ("segment", owner, -1), ("prompt_segment", 3 * pair[owner], -1)
            ):  # fmt: skip
                filled = torch.full((rows * width,), filler)
                filled[place] = values
                batch[name] = filled.view(rows, width)
        return batch
