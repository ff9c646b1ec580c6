"""Completions in turns: after each, another party's tokens are read before the model writes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rl_modules.language.sampling.protocol import Completions, Sampler, SamplingSettings
from rl_modules.language.sampling.rows import Row, completions_of, rows_of

#: Least share of a turn's sampling time that is waited for answers before the rows that have theirs go on.
_PATIENCE = 0.1


@dataclass(frozen=True)
class Further:
    """How a row goes on after a turn."""

    row: int
    #: Token ids that the model reads before it writes on.
    tokens: list[int]
    #: Of the next turn's draws.
    seed: int
    #: Most tokens of the next turn; 0: the completion has ended, and ``tokens`` are not part of it.
    limit: int
    #: Whether the other party ended it.
    finished: bool = False


class Partner(Protocol):
    """The other party of completions in turns, such as environments. Rows are numbers of completions, from 0."""

    #: Most tokens of each row's first turn.
    limits: Sequence[int]
    #: Rows that have ended a turn and not been taken.
    waiting: int
    #: How long decoding waits for an answer while other rows could go on, in seconds.
    patience_s: float

    def ended(self, row: int, tokens: list[int], finished: bool) -> None:
        """A row's turn has ended: its token ids, and whether a stop token ended it."""

    def take(self, patience_s: float | None) -> list[Further]:
        """Returns the rows that go on or have ended: all that wait, or those that are there after so many seconds;
        None: at least one of them.
        """
        ...


def converse(
    sampler: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings, partner: Partner
) -> Completions:
    """Writes one completion per prompt in turns, by the sampler's own ``converse`` where it fits."""
    own = getattr(sampler, "converse", None)
    found: Completions | None = None if own is None else own(prompts, seeds, settings, partner)
    return by_turns(sampler, prompts, seeds, settings, partner) if found is None else found


def by_turns(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    partner: Partner,
) -> Completions:
    """Writes completions in turns with any sampler: each turn is a completion of all tokens before it."""
    rows = [_Row(list(prompt)) for prompt in prompts]
    # A row whose limit is lower is cut: its tokens depend on its seed and their number alone.
    going = [Further(row, [], seed, partner.limits[row]) for row, seed in enumerate(seeds)]
    device: Any = None
    while going:
        began_s = time.monotonic()
        most = max(further.limit for further in going)
        asked = [rows[further.row].before + rows[further.row].tokens for further in going]
        part = sampler.sample(
            asked, 1, [further.seed for further in going], replace(settings, max_completion_length=most)
        )
        device = part.tokens.device
        versions = [None] * len(going) if part.version is None else part.version.tolist()
        for further, made, version in zip(going, rows_of(part), versions, strict=True):
            tokens = made.tokens[: further.limit]
            rows[further.row].write(tokens, made.log_prob[: further.limit], version)
            rows[further.row].kept += (made.kept or [])[: further.limit]
            partner.ended(further.row, tokens, made.finished and len(tokens) == len(made.tokens))
        going = []
        took_s = time.monotonic() - began_s
        while partner.waiting and not going:
            taken = partner.take(max(partner.patience_s, _PATIENCE * took_s)) or partner.take(None)
            for further in taken:
                rows[further.row].finished = further.finished
                if further.limit:
                    rows[further.row].read(further.tokens)
                    going.append(further)
    return _joined(rows, settings.pad_token_id, device)


class _Row:
    """A completion so far."""

    def __init__(self, before: list[int]) -> None:
        self.before = before
        self.tokens: list[int] = []
        self.log_prob: list[float] = []
        self.turn: list[int] = []
        self.written: list[bool] = []
        #: What filters kept for each token, empty for what was read; no lists where the sampler returns none.
        self.kept: list[list[int]] = []
        self.turns = 0
        self.finished = False
        self.version: int | None = None

    def write(self, tokens: list[int], log_prob: list[float], version: int | None) -> None:
        self._add(tokens, log_prob, True)
        self.turns += 1
        if version is not None:  # a row is as old as the oldest of its turns
            self.version = version if self.version is None else min(self.version, version)

    def read(self, tokens: list[int]) -> None:
        self._add(tokens, [0.0] * len(tokens), False)
        if self.kept:
            self.kept += [[]] * len(tokens)

    def _add(self, tokens: list[int], log_prob: list[float], written: bool) -> None:
        self.tokens += tokens
        self.log_prob += log_prob
        self.turn += [self.turns] * len(tokens)
        self.written += [written] * len(tokens)


def _joined(rows: Sequence[_Row], pad_token_id: int, device: Any) -> Completions:
    versions = [row.version for row in rows if row.version is not None]
    plain = [Row(row.tokens, row.log_prob, row.finished, row.kept or None) for row in rows]
    joined = completions_of(plain, pad_token_id, device, versions or None)
    written, turn = torch.zeros_like(joined.tokens, dtype=torch.bool), torch.zeros_like(joined.tokens)
    written[joined.mask] = torch.tensor([x for row in rows for x in row.written], device=device)
    turn[joined.mask] = torch.tensor([x for row in rows for x in row.turn], device=device)
    return replace(joined, written=written, turn=turn)
