"""Decoding of completions, with a cache whose rows can be removed or by the model's own ``generate``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.modules import on
from rl_modules.language.architecture import transformers_model
from rl_modules.language.row_cache import RowCache
from rl_modules.language.sampling.draw import NextToken
from rl_modules.language.sampling.rows import Prompts, Record, Waiting

# New tokens that the cache has room for at first; it grows by half when they are used up.
_ROOM = 64


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
        self._synced, self._called = synced, False
        #: Logits after the prompt that the cache keeps for rows that wait, (1, V).
        self._kept: Tensor | None = None

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
            return self._draw(self.live, self.cache.advance(self._forward, token, position))
        further = bool(waiting.rows) and self.prompts.sources[waiting.rows[0]] == self.prompts.sources[rows[-1]]
        fresh, logits = self._begin(rows, further)
        done = [False] * len(self.live.row) + self._draw(fresh, logits)
        self.live.join(fresh)
        return done

    def _forward(self, cache: RowCache, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the logits after the last token, (n, V); ranks with sharded weights call the model together."""
        if self._synced and self._called:
            _any_rank(True, tokens.device)
        self._called = True
        # Models without position_ids have no positions but those that follow from the mask (ALiBi).
        options = {name: x for name, x in (("position_ids", positions), ("logits_to_keep", 1)) if name in self._known}
        output = self._model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _begin(self, rows: list[int], further: bool) -> tuple[_Live, Tensor]:
        """Runs the prompts of some rows and adds the rows to the cache; returns them and the prompts' logits."""
        part = self.prompts.part(rows)
        known = 0 if self._kept is None else 1  # the first prompt has been run for rows before these
        behind = [] if self._kept is None else [self._kept]
        if len(part.lengths) > known:
            lengths = part.lengths[known:]
            begin = part.tokens.shape[1] - max(lengths)
            tokens, mask = part.tokens[known:, begin:], part.mask[known:, begin:]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)  # a prompt's first token is at 0 after any padding
            self.cache.read()
            behind.append(self._forward(self.cache, tokens, positions, mask if len(set(lengths)) > 1 else None))
        logits = torch.cat(behind) if len(behind) > 1 else behind[0]
        self._kept = logits[-1:].clone() if further else None
        self.cache.admit(part, part.sources.count(0) if known else 0, further, min(_ROOM, len(self.draws)))
        row = on(logits.device, rows)
        seen = part.seen(logits.shape[-1]) if self.rule.repetition_penalty != 1 else None
        fresh = _Live(row, torch.empty_like(row), part.length[part.source] - 1, torch.zeros_like(row), seen)
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
