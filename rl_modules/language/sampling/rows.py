"""The rows of a batch of completions: their prompts, their tokens so far, and the rows that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_modules.common.modules import on
from rl_modules.language.sampling.protocol import RowListener

#: Share of the rows in flight that must be free before waiting rows take their places. Their prompts need a separate
#: forward pass, which should serve several rows.
_FREE = 0.25


@dataclass
class Prompts:
    """Distinct prompts, padded on the left, and which of them each row continues."""

    #: (U, S)
    tokens: Tensor
    #: (U, S) bool, false in padding
    mask: Tensor
    #: (U,)
    length: Tensor
    #: (B,) in [0, U)
    source: Tensor
    #: ``length`` and ``source`` on the host.
    lengths: list[int]
    sources: list[int]

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], num_generations: int, pad_token_id: int, device: torch.device
    ) -> Prompts:
        listed = [tuple(prompt) for prompt in prompts]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(listed))}
        lengths = [len(prompt) for prompt in place]
        width = max(lengths)
        tokens = torch.tensor(
            [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in place], dtype=torch.int64
        )
        length = torch.tensor(lengths, dtype=torch.int64)
        mask = torch.arange(width) >= width - length.unsqueeze(-1)
        sources = [place[prompt] for prompt in listed for _ in range(num_generations)]
        source = torch.tensor(sources, dtype=torch.int64)
        tokens, mask, length, source = (x.to(device, non_blocking=True) for x in (tokens, mask, length, source))
        return cls(tokens, mask, length, source, lengths, sources)

    def seen(self, words: int) -> Tensor:
        """True for the tokens that each row's prompt has, (B, words); padding is no token."""
        seen = torch.zeros((len(self.tokens), words), dtype=torch.bool, device=self.tokens.device)
        line, column = self.mask.nonzero(as_tuple=True)
        seen[line, self.tokens[line, column]] = True
        return seen[self.source]

    def part(self, rows: list[int]) -> Prompts:
        """The prompts of some rows, in the order in which these rows first have them; all rows: the same object."""
        if rows == list(range(len(self.sources))):
            return self
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(self.sources[row] for row in rows))}
        lengths = [self.lengths[prompt] for prompt in place]
        sources = [place[self.sources[row]] for row in rows]
        index, source = (on(self.tokens.device, numbers) for numbers in (list(place), sources))
        begin = self.tokens.shape[1] - max(lengths)
        tokens, mask = self.tokens[index, begin:], self.mask[index, begin:]
        return Prompts(tokens, mask, self.length[index], source, lengths, sources)


class Record:
    """The completions of all rows while they grow."""

    def __init__(
        self, limit: Tensor, stops: Tensor, pad_token_id: int, on_ended: RowListener | None = None,
        keeps: bool = False, first: int = 0,
    ) -> None:  # fmt: skip
        #: The listener, which knows the rows by their numbers from ``first`` on.
        self.on_ended, self._first = on_ended, first
        #: Whether the tokens that each was drawn from are written: rows and steps of each pass, and their kept tokens.
        self.keeps, self._kept = keeps, list[tuple[Tensor, ...]]()
        shape = (len(limit), int(limit.max()))
        self.limit, self.stops, self.pad_token_id = limit, stops, pad_token_id
        self.tokens = torch.full(shape, pad_token_id, dtype=torch.int64, device=limit.device)
        self.log_prob = torch.zeros(shape, dtype=torch.float32, device=limit.device)
        self.length = torch.zeros_like(limit)
        self.finished = torch.zeros_like(limit, dtype=torch.bool)

    def add(self, step: Tensor | int, row: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
        """Writes one token to each of these rows; returns which of them have now had their last one."""
        ended = torch.isin(token, self.stops)
        self.tokens[row, step] = token
        self.log_prob[row, step] = log_prob
        self.length[row] = step + 1
        self.finished[row] = ended
        return ended | (self.limit[row] == step + 1)

    def keep(self, step: Tensor, row: Tensor, scores: Tensor) -> None:
        """Writes which tokens these rows were drawn from, by scores [n, V], -inf for the others."""
        kept = scores > -torch.inf  # rows that have ended are moved within `row`, hence the copy
        self._kept.append((row.clone(), step, kept.sum(1), kept.nonzero()[:, 1].to(torch.int32)))

    def kept(self) -> tuple[Tensor, Tensor]:
        """The tokens that each was drawn from, see :func:`~rl_modules.language.sampling.support.packed`."""
        from rl_modules.language.sampling.support import packed

        row, step, count, ids = (torch.cat(column) for column in zip(*self._kept, strict=True))
        return packed(row, step, count, ids, (len(self.tokens), self.tokens.shape[1]))

    def announce(self, row: Tensor) -> None:
        """Call the listener, where there is one, with these rows; they have ended."""
        if self.on_ended is None:
            return
        columns = (row, self.length[row], self.finished[row], self.tokens[row])
        for number, length, finished, tokens in zip(*(column.tolist() for column in columns), strict=True):
            self.on_ended(self._first + number, tokens[:length], finished)


class Waiting:
    """Rows that are not decoded yet. Rows of one prompt follow each other, so that its forward pass serves them all."""

    def __init__(self, prompts: Prompts, at_once: int | None) -> None:
        self.rows = sorted(range(len(prompts.sources)), key=prompts.sources.__getitem__)
        self._at_once = len(self.rows) if at_once is None else at_once
        self._least = max(1, int(_FREE * self._at_once))

    def take(self, live: int) -> list[int]:
        """Returns the rows to begin now, none while too few places are free."""
        free = self._at_once - live
        if live and free < min(self._least, len(self.rows)):
            return []
        taken, self.rows = self.rows[:free], self.rows[free:]
        return taken
