"""A cache of keys and values whose rows can be copied, dropped and appended to without moving the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class RowCache(Cache):
    """Keys and values of every layer, in :class:`RowLayer`."""

    def __init__(self, layers: int) -> None:
        self._rows = [RowLayer() for _ in range(layers)]
        super().__init__(layers=list(self._rows))

    @classmethod
    def for_model(cls, config: PretrainedConfig, longest: int) -> RowCache | None:
        """An empty cache for this architecture; None if its rows are more than keys and values of all their tokens.

        Args:
            config: of the model.
            longest: tokens of the longest row to come. A sliding window of at least that length never slides.
        """
        layers = DynamicCache(config=config).layers
        fits = [
            type(layer) is DynamicLayer
            or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= longest)
            for layer in layers
        ]
        return cls(len(layers)) if layers and all(fits) else None

    def expand(self, index: Tensor, mask: Tensor | None, room: int) -> None:
        """Make row i a copy of prompt ``index[i]``.

        Args:
            index: (B,) in [0, U).
            mask: false in the prompts' padding, (U, S); None where there is none.
            room: new tokens per row to have room for at first.
        """
        for layer in self._rows:
            layer.expand(index, room)

    @property
    def needs_mask(self) -> bool:
        """Whether the model needs a mask for the prompts' padding, after :meth:`expand`."""
        return True

    def attention(self, model: Any) -> AbstractContextManager[None]:
        """The context in which the model is called with this cache."""
        return nullcontext()

    def replace(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        """Copy the rows ``movers`` over the rows ``holes``, and keep the first ``rows`` rows."""
        for layer in self._rows:
            layer.replace(holes, movers, rows)


class RowLayer(DynamicLayer):
    """One layer's keys and values, with spare room after them.

    ``DynamicLayer`` copies all keys and values to append one, and all rows to drop one. Here the first call stores the
    prompts, :meth:`expand` moves them to buffers with room, and each further call writes in place and returns views.
    """

    keys: Tensor
    values: Tensor
    #: (rows, heads, room, head size), for keys and for values; keys and values are views of them.
    _buffers: tuple[Tensor, Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values of the rows that are left."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        rows, _, start, _ = self.keys.shape
        end = start + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            self._buffers = _with_room(self.keys, end + end // 2), _with_room(self.values, end + end // 2)
        keys, values = self._buffers
        keys[:rows, :, start:end] = key_states
        values[:rows, :, start:end] = value_states
        self.keys, self.values = keys[:rows, :, :end], values[:rows, :, :end]
        return self.keys, self.values

    def expand(self, index: Tensor, room: int) -> None:
        end = self.keys.shape[-2]
        self._buffers = _with_room(self.keys[index], end + room), _with_room(self.values[index], end + room)
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)

    def begin(self, rows: int, room: int) -> None:
        """Forget the prompts; instead, have this many rows without a token."""
        keys, values = (x.new_empty((rows, x.shape[1], room, x.shape[3])) for x in (self.keys, self.values))
        self._buffers = keys, values
        self.keys, self.values = (buffer[:, :, :0] for buffer in self._buffers)

    def replace(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        if len(holes):
            self.keys[holes] = self.keys[movers]
            self.values[holes] = self.values[movers]
        self.keys, self.values = self.keys[:rows], self.values[:rows]


def _with_room(states: Tensor, room: int) -> Tensor:
    rows, heads, length, size = states.shape
    buffer = states.new_empty((rows, heads, room, size))
    buffer[:, :, :length] = states
    return buffer
