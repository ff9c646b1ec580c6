"""Decoding in turns: rows keep their keys and values, and go on in the batch as soon as they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.modules import evaluation_mode, on
from rl_modules.language.architecture import is_sharded, max_length, text_config, transformers_model
from rl_modules.language.fast.grouped_attention import without_plans
from rl_modules.language.row_cache import Parked, RowCache
from rl_modules.language.sampling.check import cache_for
from rl_modules.language.sampling.decode import _ROOM, Decoding, Prompts, Record, Waiting, _Live
from rl_modules.language.sampling.draw import NextToken, uniforms
from rl_modules.language.sampling.protocol import Completions, SamplingSettings
from rl_modules.language.sampling.request import check_request, completions_from, plain_layers, rows_in_flight
from rl_modules.language.sampling.turns import Further, Partner


class Conversing(Decoding):
    """One call of :func:`~rl_modules.language.sampling.turns.converse` with the model itself.

    What a row reads between turns is fed in the steps in which others write. A row that waits longer than the partner's
    patience leaves the batch with a copy of its keys and values.
    """

    def __init__(
        self,
        model: Any,
        cache: RowCache,
        prompts: Prompts,
        rule: NextToken,
        seeds: Sequence[int],
        record: Record,
        partner: Partner,
    ) -> None:
        shape, device = record.tokens.shape, record.tokens.device
        draws = torch.zeros((shape[1], shape[0]), dtype=torch.float64, device=device)
        super().__init__(model, cache, prompts, rule, draws, record)
        self.partner = partner
        #: The token that a row reads at a place of its completion; -1: it writes there.
        self.given = torch.full(shape, -1, dtype=torch.int64, device=device)
        #: Where each row's turns begin, where its last one begins to be written, and of rows that have ended whether
        #: the partner ended them.
        self.begins: list[list[int]] = [[] for _ in range(shape[0])]
        self._writes_from = [0] * shape[0]
        self.over: dict[int, bool] = {}
        self._parked: dict[int, tuple[Parked, _Live]] = {}
        self._open(
            [
                Further(row, [], seed, limit)
                for row, (seed, limit) in enumerate(zip(seeds, partner.limits, strict=True))
            ],
            [0] * shape[0],
        )

    def run(self, at_once: int | None = None) -> None:
        waiting = Waiting(self.prompts, at_once)
        with self.cache.attention(transformers_model(self._model)):
            while waiting.rows or len(self.live.row) or self.partner.waiting:
                if self.partner.waiting:
                    can_go_on = len(self.live.row) > 0 or bool(waiting.rows)
                    self._come_back(self.partner.take(0.0 if can_go_on else None))
                rows = waiting.take(len(self.live.row) + len(self._parked))
                if (rows or len(self.live.row)) and any(done := self._step(rows, waiting)):
                    self._end_turns(done)

    def completions(self, written: Completions) -> Completions:
        """Adds what the turns were to the record's completions."""
        width = written.tokens.shape[1]
        starts = torch.zeros((len(self.begins), width + 1), dtype=torch.int64)
        for row, begins in enumerate(self.begins):
            starts[row, begins[1:]] = 1
        finished = [self.over[row] for row in range(len(self.begins))]
        return replace(
            written,
            finished=torch.tensor(finished, device=written.finished.device),
            written=(self.given[:, :width] < 0) & written.mask,
            turn=torch.where(written.mask, starts[:, :width].cumsum(1).to(written.tokens.device), 0),
        )

    def _draw(self, rows: _Live, logits: Tensor) -> list[bool]:
        scores = self.rule.scores(logits, rows.seen)
        token, log_prob = self.rule.draw_from(scores, self.draws[rows.step, rows.row])
        given = self.given[rows.row, rows.step]
        writes = given < 0
        rows.token = torch.where(writes, token, given)
        if rows.seen is not None:
            rows.seen.scatter_(-1, rows.token.unsqueeze(-1), True)
        done = self.record.add(rows.step, rows.row, rows.token, torch.where(writes, log_prob, 0.0)) & writes
        if self.record.keeps:
            self.record.keep(rows.step[writes], rows.row[writes], scores[writes])
        rows.position, rows.step = rows.position + 1, rows.step + 1
        return done.tolist()

    def _open(self, turns: Sequence[Further], places: Sequence[int]) -> None:
        """Prepares the next turns of rows, whose completions have so many tokens."""
        row, column, token = list[int](), list[int](), list[int]()
        begins: list[int] = []
        for further, place in zip(turns, places, strict=True):
            count = len(further.tokens)
            row += [further.row] * count
            column += range(place, place + count)
            token += further.tokens
            begins.append(place + count)
            self.begins[further.row].append(place)
            self._writes_from[further.row] = place + count
        device = self.given.device
        if token:
            self.given[on(device, row), on(device, column)] = on(device, token)
        drawn = uniforms([further.seed for further in turns], max(further.limit for further in turns)).to(device)
        for i, (further, begin) in enumerate(zip(turns, begins, strict=True)):
            self.draws[begin : begin + further.limit, further.row] = drawn[: further.limit, i]
        ends = [begin + further.limit for further, begin in zip(turns, begins, strict=True)]
        self.record.limit[on(device, [further.row for further in turns])] = on(device, ends)

    def _end_turns(self, done: list[bool]) -> None:
        """Hands what rows have written to the partner; those that are not answered at once are parked."""
        lines = [line for line, is_done in enumerate(done) if is_done]
        row = self.live.row[on(self.live.row.device, lines)]
        columns = (row, self.record.length[row], self.record.finished[row], self.record.tokens[row])
        rows, lengths, *others = (column.tolist() for column in columns)
        for number, length, finished, tokens in zip(rows, lengths, *others, strict=True):
            self.partner.ended(number, tokens[self._writes_from[number] : length], finished)
        taken = {further.row: further for further in self.partner.take(self.partner.patience_s)}
        own = [taken.pop(number, None) for number in rows]
        stay = [(further, length) for further, length in zip(own, lengths, strict=True) if further and further.limit]
        if stay:
            self._open([further for further, _ in stay], [length for _, length in stay])
        for further in own:
            if further is not None and not further.limit:
                self.over[further.row] = further.finished
        slow = [line for line, further in zip(lines, own, strict=True) if further is None]
        for line, parked in zip(slow, self.cache.take_out(slow) if slow else [], strict=True):
            values = {name: x[line : line + 1].clone() for name, x in vars(self.live).items() if x is not None}
            self._parked[int(self.live.row[line])] = parked, _Live(**values)
        for line, further in zip(lines, own, strict=True):
            done[line] = further is None or not further.limit
        if any(done):
            self.live.drop(done, self.cache)
        self._come_back(list(taken.values()))

    def _come_back(self, taken: Sequence[Further]) -> None:
        """Adds parked rows that are answered to the batch, or ends them."""
        going = []
        for further in taken:
            parked, live = self._parked.pop(further.row)
            if further.limit:
                going.append((further, parked, live))
            else:
                self.over[further.row] = further.finished
        if going:
            self._open([further for further, _, _ in going], [int(live.step) for _, _, live in going])
            self.cache.put_back([parked for _, parked, _ in going], min(_ROOM, len(self.draws)))
            for _, _, live in going:
                self.live.join(live)


def converse_natively(
    model: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    partner: Partner,
    max_rows_in_flight: int | None,
    graph_memory: float,
) -> Completions | None:
    """Writes completions in turns with the keys and values of earlier turns; None: this model can't."""
    whole = settings.max_completion_length
    config = text_config(model.config)
    check_request(
        prompts, 1, whole, list(settings.eos_token_id), seeds, positions := max_length(config), config.vocab_size
    )
    device = next(model.parameters()).device
    if is_sharded(model) or device.type == "mps":
        return None
    at_once = rows_in_flight(model, prompts, 1, whole, max_rows_in_flight, False)
    with torch.no_grad(), evaluation_mode(model.modules()), without_plans(), plain_layers(model):
        longest = min(max(map(len, prompts)) + whole, positions)
        cache = cache_for("dynamic", model, longest, False, at_once, graph_memory)
        if cache is None:
            return None
        batch = Prompts.of(prompts, 1, settings.pad_token_id, device)
        limit = (positions - batch.length[batch.source]).clamp(max=whole)
        ends = torch.tensor(settings.eos_token_id, dtype=torch.int64, device=device)
        rule = NextToken(
            settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty
        )
        keeps = settings.return_sampling_mask and rule.truncates
        record = Record(limit, ends, settings.pad_token_id, None, keeps)
        conversing = Conversing(model, cache, batch, rule, seeds, record, partner)
        conversing.run(None if at_once >= len(prompts) else at_once)
        return conversing.completions(completions_from(record, model))
