"""Decoding with a cache of fixed size: every step has the same shapes and addresses, so that it can be compiled.

A step of decoding on a GPU is hundreds of small kernels, and starting them takes longer than running them. A CUDA graph
starts them all at once, but replays one sequence of shapes and addresses only. Rows have fixed places here, and a row's
token number p is in column p; the model is called with as many rows as the smallest of a few sizes that holds the rows
left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rl_modules.common.indices import on
from rl_modules.language.row_cache import Forward, RowCache, RowLayer

if TYPE_CHECKING:
    from rl_modules.language.sampling.rows import Prompts

log = logging.getLogger(__name__)

#: Numbers of rows that the model is called with: all places, a half of them, a quarter, an eighth.
_SIZES = 4
#: How a step is compiled on CUDA.
COMPILE: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
#: Compiled steps by model; None: compiling failed.
_steps: WeakKeyDictionary[nn.Module, Forward | None] = WeakKeyDictionary()


class StaticRowCache(RowCache):
    """Keys and values of ``slots`` rows of at most ``columns`` tokens, allocated at once."""

    def __init__(self, layers: int, slots: int, columns: int) -> None:
        super().__init__(layers, [StaticRowLayer(slots, columns) for _ in range(layers)])
        self.slots, self.columns = slots, columns
        self._count = 0

    @classmethod
    def with_slots(cls, slots: int, config: PretrainedConfig, longest: int) -> StaticRowCache | None:
        """Returns an empty cache for this architecture, or None: see :meth:`RowCache.for_model`."""
        found = RowCache.for_model(config, longest)
        return None if found is None else cls(len(found.layers), slots, longest)

    def admit(self, prompts: Prompts, kept_rows: int, keep: bool, room: int) -> None:
        length = prompts.length[prompts.source]
        index = prompts.source
        for layer in self._static:
            later = index[kept_rows:] - int(kept_rows > 0)
            layer.place(self._count, index[:kept_rows], later, length, self.reading, keep)
        self.reading = False
        self._count += len(index)

    def replace(self, holes: list[int], movers: list[int], rows: int) -> None:
        device = self._rows[0].device
        hole, mover = on(device, holes), on(device, movers)
        for layer in self._static:
            layer.replace(hole, mover, rows)
        self._count = rows

    def advance(self, forward: Forward, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = len(tokens)
        size = self.size_for(rows)
        if size > rows:  # places without a row read one token
            tokens, positions = (torch.nn.functional.pad(x, (0, 0, 0, size - rows)) for x in (tokens, positions))
        column = positions[:, 0]
        mask = torch.arange(self.columns, device=column.device) <= column.unsqueeze(1)
        for layer in self._static:
            layer.column = column
        return forward(self, tokens, positions, mask)[:rows]

    def size_for(self, rows: int) -> int:
        """Rows that the model is called with to decode this many."""
        sizes = [-(-self.slots // 2**i) for i in range(_SIZES)]
        return min(size for size in sizes if size >= rows)

    @property
    def _static(self) -> list[StaticRowLayer]:
        return [layer for layer in self._rows if isinstance(layer, StaticRowLayer)]


class StaticRowLayer(RowLayer):
    """One layer's keys and values in buffers that never move."""

    #: (rows,): where each row's next token goes.
    column: Tensor

    def __init__(self, slots: int, columns: int) -> None:
        super().__init__()
        self._shape = slots, columns

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token per row, and returns all columns of these rows."""
        if not self.is_initialized:
            return super().update(key_states, value_states)
        assert self._buffers is not None
        keys, values = self._buffers
        row = torch.arange(len(key_states), device=key_states.device)
        keys[row, :, self.column] = key_states[:, :, 0].to(keys.dtype)
        values[row, :, self.column] = value_states[:, :, 0].to(values.dtype)
        return keys[: len(key_states)], values[: len(key_states)]

    def get_seq_length(self) -> int:
        # With one more the mask has all columns; the one that the model is given says which count.
        return self._shape[1] - 1 if self.is_initialized else 0

    def place(self, begin: int, kept: Tensor, index: Tensor, length: Tensor, has_read: bool, keep: bool) -> None:
        """Puts rows that continue the kept prompt, and rows that continue prompts just read, after ``begin`` rows."""
        read = (self.keys, self.values) if has_read else None
        if self._buffers is None:
            assert read is not None
            keys, values = (x.new_zeros((self._shape[0], x.shape[1], self._shape[1], x.shape[3])) for x in read)
            for buffer in (keys, values):
                torch._dynamo.mark_static_address(buffer)
            self._buffers = keys, values
        if len(kept):
            assert self._kept is not None
            self._write(self._kept, begin, kept, length[: len(kept)])
        if read is not None:
            self._write(read, begin + len(kept), index, length[len(kept) :])
            if keep:
                self._kept = read[0][-1:].clone(), read[1][-1:].clone()
        if not keep:
            self._kept = None
        self.is_initialized = True
        self.keys, self.values = self._buffers

    def replace(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        assert self._buffers is not None
        if len(holes):
            for buffer in self._buffers:
                buffer[holes] = buffer[movers]

    def _write(self, prompts: tuple[Tensor, Tensor], begin: int, index: Tensor, length: Tensor) -> None:
        """Prompts are padded on the left; their rows begin in column 0."""
        assert self._buffers is not None
        width = prompts[0].shape[-2]
        column = torch.arange(width, device=length.device) + (width - length).unsqueeze(1)
        for buffer, states in zip(self._buffers, prompts, strict=True):
            shifted = states[index.unsqueeze(1), :, column.clamp(max=width - 1)]  # (n, S, heads, size)
            buffer[begin : begin + len(index), :, :width] = shifted.transpose(1, 2)


def step_of(model: Any, forward: Forward) -> Forward:
    """Returns a step of decoding, compiled on devices on which this works."""
    if next(model.parameters()).device.type != "cuda":
        return forward
    if model not in _steps:
        _steps[model] = torch.compile(forward, **COMPILE)
    compiled = _steps[model]
    return forward if compiled is None else partial(_guarded, model, compiled, forward)


def _guarded(
    model: Any,
    compiled: Forward,
    forward: Forward,
    cache: RowCache,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor | None,
) -> Tensor:
    if _steps[model] is None:
        return forward(cache, tokens, positions, mask)
    try:
        return compiled(cache, tokens, positions, mask).clone()  # the graph's next replay overwrites its output
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        _steps[model] = None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        name = type(model).__name__
        log.warning("%s: compiling a step of decoding fails (%s), so that it runs as it is", name, reason)
        # Each column is written again with the same numbers.
        return forward(cache, tokens, positions, mask)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time of the second of two calls; the first one compiles."""
    began_s = 0.0
    for _ in range(2):
        _wait(device)
        began_s = time.perf_counter()
        run()
        _wait(device)
    return time.perf_counter() - began_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
