"""A cache of keys and values whose rows can be added, copied, dropped and appended to without moving the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rl_modules.common.modules import on

if TYPE_CHECKING:
    from rl_modules.language.sampling.decode import Prompts

_States = tuple[Tensor, Tensor]
Forward = Callable[["RowCache", Tensor, Tensor, Tensor | None], Tensor]


class RowCache(Cache):
    """Keys and values of every layer, in :class:`RowLayer`; all rows end in the same column, also those added later."""

    def __init__(self, layers: int, made: Sequence[RowLayer] | None = None) -> None:
        self._rows = [RowLayer() for _ in range(layers)] if made is None else list(made)
        super().__init__(layers=list(self._rows))
        #: Whether the model is reading prompts, during which the cache reports to be empty.
        self.reading = False
        #: Columns so far since the first prompts, and the one that each row begins in.
        self._clock, self._first = 0, list[int]()
        #: Columns before each row's own, (n,); None where no row has any.
        self._before: Tensor | None = None

    @classmethod
    def for_model(cls, config: PretrainedConfig, longest: int) -> RowCache | None:
        """An empty cache for this architecture; None if its rows are more than keys and values of all their tokens."""
        layers = DynamicCache(config=config).layers
        fits = [
            type(layer) is DynamicLayer
            or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= longest)
            for layer in layers
        ]
        return cls(len(layers)) if layers and all(fits) else None

    def read(self) -> None:
        """Makes the cache report to be empty, because the next forward pass reads further prompts."""
        self.reading = True
        for layer in self._rows:
            layer.is_initialized = False

    def admit(self, prompts: Prompts, kept_rows: int, keep: bool, room: int) -> None:
        """Adds a row per element of ``prompts.source``, after the existing rows."""
        index = prompts.source
        for layer in self._rows:
            layer.admit(index[:kept_rows], index[kept_rows:] - int(kept_rows > 0), self.reading, keep, room)
        self.reading = False
        self._place(self._first + [self._clock - prompts.lengths[source] for source in prompts.sources])

    def step(self) -> Tensor | None:
        """Begins a forward pass of one token per row; returns its mask (n, width), or None if none is needed."""
        self._clock += 1
        width = self._clock - min(self._first)
        return None if self._before is None else torch.arange(width, device=self._before.device) >= self._before

    def advance(self, forward: Forward, tokens: Tensor, positions: Tensor) -> Tensor:
        """One forward pass of one token per row."""
        return forward(self, tokens, positions, self.step())

    @contextmanager
    def attention(self, model: Any) -> Iterator[None]:
        """In the context the model is called with this cache. What autocast makes of weights is kept within it; under
        Lightning each forward pass makes it anew.
        """
        kind = next(model.parameters()).device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=True):
            try:
                yield
            finally:  # made without gradient
                torch.clear_autocast_cache()

    def replace(self, holes: list[int], movers: list[int], rows: int) -> None:
        """Copies the rows ``movers`` over the rows ``holes``, and keeps the first ``rows`` rows."""
        device = self._rows[0].device
        hole, mover = on(device, holes), on(device, movers)
        for layer in self._rows:
            layer.replace(hole, mover, rows)
        for i, j in zip(holes, movers, strict=True):
            self._first[i] = self._first[j]
        self._place(self._first[:rows])

    def take_out(self, rows: list[int]) -> list[Parked]:
        """Returns copies of what the cache holds of some rows, which come back with them after they were dropped."""
        return [
            Parked([layer.states(row, width) for layer in self._rows], width)
            for row, width in ((row, self._clock - self._first[row]) for row in rows)
        ]

    def put_back(self, parked: Sequence[Parked], room: int) -> None:
        """Adds rows that were taken out, after the existing ones."""
        width = max(row.width for row in parked)
        index = torch.arange(len(parked), device=self._rows[0].device)
        for number, layer in enumerate(self._rows):
            states = [row.states[number] for row in parked]
            keys, values = (
                torch.stack(
                    [pad(state[i], (0, 0, width - row.width, 0)) for state, row in zip(states, parked, strict=True)]
                )
                for i in (0, 1)
            )
            layer.append((keys, values), index, room)
        self._place([*self._first, *[self._clock - row.width for row in parked]])

    def _place(self, first: list[int]) -> None:
        """Stores where rows begin, and drops columns that no row uses any more."""
        self._first, self._before = first, None
        if not first:
            return
        begin = min(first)
        for layer in self._rows:
            layer._begin = layer._end - self._clock + begin
            layer._view()
        if any(column != begin for column in first):
            self._before = on(self._rows[0].device, [column - begin for column in first]).unsqueeze(1)


@dataclass(eq=False)
class Parked:
    """A row that was taken out of a cache: per layer its keys and values, (heads, width, head size)."""

    states: list[_States]
    width: int
    #: Its prompt, of a cache that keeps prompts apart.
    source: int = -1


class RowLayer(DynamicLayer):
    """One layer's keys and values in buffers with spare room; ``DynamicLayer`` copies all to add or drop one."""

    keys: Tensor
    values: Tensor
    #: (rows, heads, room, head size), for keys and for values; keys and values are views of them.
    _buffers: _States | None = None
    _kept: _States | None = None
    _count = _begin = _end = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values, and returns all those of the remaining rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self._buffers is not None
        end = self._end + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            end -= self._begin
            self._move(self._count, 0, end + end // 2)
        keys, values = self._buffers
        keys[: self._count, :, self._end : end] = key_states
        values[: self._count, :, self._end : end] = value_states
        self._end = end
        self._view()
        return self.keys, self.values

    def admit(self, kept: Tensor, index: Tensor, has_read: bool, keep: bool, room: int) -> None:
        """Adds rows that continue the kept prompt, and rows that continue prompts just read; see :class:`RowCache`."""
        read = (self.keys, self.values) if has_read else None
        if len(kept):
            assert self._kept is not None
            self.append((self._kept[0], self._kept[1]), kept, room)
        if read is not None:
            self.append(read, index, room)
            if keep:
                self._kept = read[0][-1:].clone(), read[1][-1:].clone()
        if not keep:
            self._kept = None

    def append(self, prompts: _States, index: Tensor, room: int) -> None:
        """Adds rows that continue ``prompts[index]`` and end in the last column."""
        width, rows = prompts[0].shape[-2], self._count + len(index)
        if not self._count:
            self._buffers = _with_room(prompts[0][index], width + room), _with_room(prompts[1][index], width + room)
            self._begin, self._end = 0, width
        else:
            assert self._buffers is not None
            if rows > len(self._buffers[0]) or self._end < width:
                now = self._end - self._begin
                self._move(rows, max(0, width - now), max(now, width) + max(room, now // 2))
            for buffer, states in zip(self._buffers, prompts, strict=True):
                # Masked values must still be finite.
                buffer[self._count : rows, :, : self._end - width] = 0
                buffer[self._count : rows, :, self._end - width : self._end] = states[index]
            self._begin = min(self._begin, self._end - width)
        self._count, self.is_initialized = rows, True
        self._view()

    def append_empty(self, count: int, room: int) -> None:
        """Adds rows without a token, because this layer does not hold the prompts."""
        if self._buffers is None or not self._count:
            keys, values = (x.new_empty((count, x.shape[1], room, x.shape[3])) for x in (self.keys, self.values))
            self._buffers = keys, values
            self._begin = self._end = 0
        rows = self._count + count
        if rows > len(self._buffers[0]):
            width = self._end - self._begin
            self._move(rows, 0, width + max(room, width // 2))
        assert self._buffers is not None
        for buffer in self._buffers:
            buffer[self._count : rows, :, : self._end] = 0  # what a mask hides must be a number still
        self._count, self.is_initialized = rows, True
        self._view()

    def states(self, row: int, width: int) -> _States:
        """Returns copies of the last columns of a row."""
        end = self.keys.shape[-2]
        return self.keys[row, :, end - width :].clone(), self.values[row, :, end - width :].clone()

    def replace(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        if len(holes):
            self.keys[holes] = self.keys[movers]
            self.values[holes] = self.values[movers]
        self._count = rows
        self._view()

    def _view(self) -> None:
        assert self._buffers is not None
        self.keys, self.values = (buffer[: self._count, :, self._begin : self._end] for buffer in self._buffers)

    def _move(self, rows: int, before: int, room: int) -> None:
        """Copies the current columns to new buffers, after ``before`` columns of zeros."""
        self._view()
        self._buffers = _with_room(self.keys, room, rows, before), _with_room(self.values, room, rows, before)
        self._begin, self._end = before, before + self._end - self._begin


def _with_room(states: Tensor, room: int, rows: int | None = None, before: int = 0) -> Tensor:
    count, heads, length, size = states.shape
    buffer = states.new_empty((rows or count, heads, room, size))
    buffer[:count, :, before : before + length] = states
    if before:
        buffer[:count, :, :before] = 0
    return buffer
