"""Decoding of completions: prompts, the rows that are written, and the loop that draws token by token."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules.common.modules import on
from rl_modules.language.architecture import cache_argument, transformers_model
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling.draw import NextToken
from rl_modules.language.sampling.protocol import RowListener
from rl_modules.language.sampling.stop_strings import StopStrings
from rl_modules.language.sampling.support import packed

if TYPE_CHECKING:
    from rl_modules.language.vision import RowImages

# New tokens that the cache has room for at first; it grows by half when they are used up.
_ROOM = 64
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
    #: Of each distinct prompt; None: there are none.
    images: list[RowImages] | None = None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        pad_token_id: int,
        device: torch.device,
        images: Sequence[RowImages] | None = None,
    ) -> Prompts:
        # Equal tokens with other images are another prompt.
        shown = [None] * len(prompts) if images is None else list(map(id, images))
        listed = [(tuple(prompt), own) for prompt, own in zip(prompts, shown, strict=True)]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(listed))}
        distinct = None if images is None else list(dict(zip(listed, images, strict=True)).values())
        lengths = [len(prompt) for prompt, _ in place]
        width = max(lengths)
        tokens = torch.tensor(
            [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt, _ in place], dtype=torch.int64
        )
        length = torch.tensor(lengths, dtype=torch.int64)
        mask = torch.arange(width) >= width - length.unsqueeze(-1)
        sources = [place[prompt] for prompt in listed for _ in range(num_generations)]
        source = torch.tensor(sources, dtype=torch.int64)
        tokens, mask, length, source = (x.to(device, non_blocking=True) for x in (tokens, mask, length, source))
        return cls(tokens, mask, length, source, lengths, sources, distinct)

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
        images = None if self.images is None else [self.images[prompt] for prompt in place]
        return Prompts(tokens, mask, self.length[index], source, lengths, sources, images)


class Record:
    """The completions of all rows while they grow."""

    def __init__(
        self,
        limit: Tensor,
        stops: Tensor,
        pad_token_id: int,
        on_ended: RowListener | None = None,
        keeps: bool = False,
        stop: StopStrings | None = None,
    ) -> None:
        self.on_ended = on_ended
        #: Whether the tokens that each was drawn from are written: rows and steps of each pass, and their kept tokens.
        self.keeps, self._kept = keeps, list[tuple[Tensor, ...]]()
        shape = (len(limit), int(limit.max()))
        self.stop = stop
        self.limit, self.stops, self.pad_token_id = limit, stops, pad_token_id
        self.tokens = torch.full(shape, pad_token_id, dtype=torch.int64, device=limit.device)
        self.log_prob = torch.zeros(shape, dtype=torch.float32, device=limit.device)
        self.length = torch.zeros_like(limit)
        self.finished = torch.zeros_like(limit, dtype=torch.bool)

    def add(self, step: Tensor | int, row: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
        """Writes one token to each of these rows; returns which of them have now had their last one."""
        ended = torch.isin(token, self.stops)
        self.tokens[row, step] = token
        if self.stop is not None:
            ended = ended | self.stop.end_at(self.tokens, row, step)
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
        row, step, count, ids = (torch.cat(column) for column in zip(*self._kept, strict=True))
        return packed(row, step, count, ids, (len(self.tokens), self.tokens.shape[1]))

    def announce(self, row: Tensor) -> None:
        """Calls the listener, where there is one, with these rows; they have ended."""
        if self.on_ended is None:
            return
        columns = (row, self.length[row], self.finished[row], self.tokens[row])
        for number, length, finished, tokens in zip(*(column.tolist() for column in columns), strict=True):
            self.on_ended(number, tokens[:length], finished)


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


@dataclass
class _Live:
    """The rows that have begun and not ended; line i here is line i of the cache."""

    row: Tensor  # (n,) in [0, B)
    token: Tensor  # (n,) the last one drawn
    position: Tensor  # (n,) of that token
    step: Tensor  # (n,) tokens drawn so far
    seen: Tensor | None = None  # (n, V) true for tokens that the row has; None where nobody asks

    def join(self, others: _Live) -> None:
        """Appends further rows."""
        for name, lines in vars(others).items():
            own = getattr(self, name)
            setattr(self, name, torch.cat([own, lines]) if own is not None and len(own) else lines)

    def drop(self, done: list[bool], cache: RowCache) -> None:
        """Moves rows from the end into the places of those that are done: few rows move, each at most once a step."""
        left = len(done) - sum(done)
        empty = [i for i in range(left) if done[i]]
        moved = [i for i in range(left, len(done)) if not done[i]]
        holes, movers = torch.tensor([empty, moved], dtype=torch.int64).to(self.row.device, non_blocking=True)
        for name, lines in vars(self).items():
            if lines is not None:
                lines[holes] = lines[movers]
                setattr(self, name, lines[:left])
        cache.replace(empty, moved, left)


class Decoding:
    """Runs each distinct prompt once, then draws token by token; holds the unfinished rows and what continues them."""

    def __init__(
        self,
        model: Any,
        cache: RowCache,
        prompts: Prompts,
        rule: NextToken,
        draws: Tensor,
        record: Record,
        synced: bool = False,
    ) -> None:
        self.cache, self.prompts, self.rule, self.draws, self.record = cache, prompts, rule, draws, record
        none = prompts.source[:0]
        self.live = _Live(none, none, none, none)
        self._model, self._known = model, inspect.signature(transformers_model(model).forward).parameters
        self._cache_name, self._synced, self._called = cache_argument(model), synced, False
        #: Logits after the prompt that the cache keeps for rows that wait, (1, V), and its place for the next token.
        self._kept: Tensor | None = None
        self._kept_place = none

    def run(self, at_once: int | None = None) -> None:
        """Decodes all rows, at most so many together; waiting ones take the places of those that end."""
        waiting = Waiting(self.prompts, at_once)
        with self.cache.attention(transformers_model(self._model)):
            while waiting.rows or len(self.live.row):
                done = self._step(waiting.take(len(self.live.row)), waiting)
                if any(done):
                    if self.record.on_ended is not None:
                        self.record.announce(self.live.row[torch.tensor(done, device=self.live.row.device)])
                    self.live.drop(done, self.cache)
        # Other ranks wait for this one's part of the weights.
        while self._synced and _any_rank(False, self.draws.device):
            self._model(input_ids=self.prompts.tokens[:1, -1:], use_cache=False)

    def _step(self, rows: list[int], waiting: Waiting) -> list[bool]:
        """Draws the first tokens of new ``rows``, or without any the next of the live ones; returns which are done."""
        if not rows:
            token, position = self.live.token.unsqueeze(-1), self.live.position.unsqueeze(-1)
            if self.prompts.images is not None:
                token = self.prompts.images[0].as_read(self._model, token)
            return self._draw(self.live, self.cache.advance(self._forward, token, position))
        further = bool(waiting.rows) and self.prompts.sources[waiting.rows[0]] == self.prompts.sources[rows[-1]]
        fresh, logits = self._begin(rows, further)
        done = [False] * len(self.live.row) + self._draw(fresh, logits)
        self.live.join(fresh)
        return done

    def _forward(
        self, cache: RowCache, tokens: Tensor, positions: Tensor, mask: Tensor | None, **shown: Tensor
    ) -> Tensor:
        """Returns the logits after the last token, (n, V); ranks with sharded weights call the model together."""
        if self._synced and self._called:
            _any_rank(True, tokens.device)
        self._called = True
        # Models without position_ids have no positions but those that follow from the mask (ALiBi).
        given = {"position_ids": positions, "logits_to_keep": 1}
        options = {self._cache_name: cache, **{name: x for name, x in given.items() if name in self._known}}
        given = {"input_ids": tokens, **shown}
        output = self._model(attention_mask=mask, use_cache=True, **given, **options)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _begin(self, rows: list[int], further: bool) -> tuple[_Live, Tensor]:
        """Runs the prompts of some rows and adds the rows to the cache; returns them and the prompts' logits."""
        part = self.prompts.part(rows)
        known = 0 if self._kept is None else 1  # the first prompt has been run for rows before these
        behind = [] if self._kept is None else [self._kept]
        places = [self._kept_place]
        if len(part.lengths) > known:
            lengths = part.lengths[known:]
            begin = part.tokens.shape[1] - max(lengths)
            tokens, mask = part.tokens[known:, begin:], part.mask[known:, begin:]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)  # a prompt's first token is at 0 after any padding
            shown: dict[str, Tensor] = {}
            if part.images is not None:
                images = part.images[known].joined(part.images[known + 1 :])
                shown, placed = images.inputs(self._model, tokens), images.positions(self._model, tokens, mask)
                positions = positions if placed is None else placed
            self.cache.read()
            padding = mask if len(set(lengths)) > 1 else None
            behind.append(self._forward(self.cache, tokens, positions, padding, **shown))
            places.append(positions.view(-1, *mask.shape).amax((0, 2)))
        logits = torch.cat(behind) if len(behind) > 1 else behind[0]
        place = torch.cat(places)
        self._kept = logits[-1:].clone() if further else None
        self._kept_place = place[-1:] if further else place[:0]
        self.cache.admit(part, part.sources.count(0) if known else 0, further, min(_ROOM, len(self.draws)))
        row = on(logits.device, rows)
        seen = part.seen(logits.shape[-1]) if self.rule.repetition_penalty != 1 else None
        fresh = _Live(row, torch.empty_like(row), place[part.source], torch.zeros_like(row), seen)
        return fresh, logits[part.source]

    def _draw(self, rows: _Live, logits: Tensor) -> list[bool]:
        """Draws a token for each of these rows; returns which of them have now had their last one."""
        scores = self.rule.scores(logits, rows.seen)
        rows.token, log_prob = self.rule.draw_from(scores, self.draws[rows.step, rows.row])
        if rows.seen is not None:
            rows.seen.scatter_(-1, rows.token.unsqueeze(-1), True)
        ended = self.record.add(rows.step, rows.row, rows.token, log_prob)
        if self.record.keeps:
            self.record.keep(rows.step, rows.row, scores)
        rows.position, rows.step = rows.position + 1, rows.step + 1
        # The only synchronisation per token: the number of remaining rows decides the next shapes.
        return ended.tolist()


def _any_rank(value: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(value), dtype=torch.int64, device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
