"""Decoding steps as CUDA graphs, on tensors that never move.

A step of decoding on a GPU is hundreds of small kernels, and starting them takes longer than running them. A CUDA graph
starts them all at once, but replays one sequence of shapes and addresses only. So keys and values are allocated once, a
row's token number p is in column p, and a step runs on as many rows and columns as the smallest bucket that holds those
in use. Capturing a bucket takes some hundredths of a second, and compiles nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rl_modules.common.modules import on
from rl_modules.fast.graphs import RECORDERS
from rl_modules.language.fast.grouped_attention import attention_of
from rl_modules.language.row_cache import Forward, RowCache, RowLayer

if TYPE_CHECKING:
    from rl_modules.language.sampling.decode import Prompts

log = logging.getLogger(__name__)

#: The smallest buckets: fewer rows or columns take as long.
_ROWS, _COLUMNS = 8, 64


def bucket(number: int, least: int = 1) -> int:
    """Returns the smallest of the powers of two and their halves above them (1, 2, 3, 4, 6, 8, 12 …) that holds it."""
    power = 1 << max(number - 1, 0).bit_length()
    return max(least, power * 3 // 4 if number <= power * 3 // 4 else power)


def columns_for(longest: int) -> int:
    """Columns that are allocated for rows of at most so many tokens."""
    return bucket(longest, _COLUMNS)


class Graph:
    """A step on tensors that never move, recorded; where no device records it a replay calls it."""

    def __init__(self, step: Callable[[], None], device: torch.device, pool: Any = None, records: bool = True) -> None:
        self.replay: Callable[[], object] = step
        #: Memory that the recording keeps, in bytes.
        self.size = 0
        if records and device.type in RECORDERS:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                graph = RECORDERS[device.type](device, (), pool)
                graph.warm_up(step)  # loads kernels and allocates workspaces, which a recording must not
                before = _free(device)
                graph.capture(step)
                self.replay, self.size = graph.replay, max(0, before - _free(device))


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class GraphCache(RowCache):
    """Keys and values of ``slots`` rows of at most ``columns`` tokens, in tensors that stay for captured graphs."""

    def __init__(self, layers: int, slots: int, columns: int, device: torch.device, grouped: bool = False) -> None:
        super().__init__(layers, [FixedLayer() for _ in range(layers)])
        self.slots, self.columns, self.grouped = slots, columns, grouped
        #: Memory that the graphs may keep, in bytes; None: that of one, and a step that can't be captured is an error.
        self.most: float | None = None
        #: Keys and values, (layers, slots, heads, columns, size) each; a pair per layer where their shapes differ.
        self._stores: list[Tensor] = []
        self._token = torch.zeros((slots, 1), dtype=torch.int64, device=device)
        self._position = torch.zeros(slots, dtype=torch.int64, device=device)
        self._slot, self._column = (torch.arange(n, device=device) for n in (slots, columns))
        self._logits: Tensor | None = None
        self._graphs: OrderedDict[tuple[int, int], Graph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._is_captured = True
        #: Within it a step runs: see :class:`CastWeights`.
        self.weights: Callable[[], AbstractContextManager[None]] = nullcontext
        self._forward: Forward | None = None

    @property
    def bytes(self) -> int:
        """Memory that stays allocated between two generations."""
        held = [*self._stores, *([] if self._logits is None else [self._logits])]
        return sum(x.numel() * x.element_size() for x in held) + sum(graph.size for graph in self._graphs.values())

    @contextmanager
    def attention(self, model: Any) -> Iterator[None]:
        try:
            with attention_of(model) if self.grouped else nullcontext():
                yield
        finally:  # ready for the next generation, and without a reference to the model
            self._forward, self._first, self._clock = None, [], 0
            self._position.zero_()
            for layer in self._fixed:
                layer.forget()

    def admit(self, prompts: Prompts, kept_rows: int, keep: bool, room: int) -> None:
        if not self._stores:
            self._allocate()
        index, begin = prompts.source, len(self._first)
        length = prompts.length[index]
        for layer in self._fixed:
            later = index[kept_rows:] - int(kept_rows > 0)
            layer.place(begin, index[:kept_rows], later, length, self.reading, keep)
        self.reading = False
        self._first += [self._clock - prompts.lengths[source] for source in prompts.sources]

    def replace(self, holes: list[int], movers: list[int], rows: int) -> None:
        if holes:
            hole, mover = on(self._token.device, holes), on(self._token.device, movers)
            for store in self._stores:
                store[:, hole] = store[:, mover]
            for i, j in zip(holes, movers, strict=True):
                self._first[i] = self._first[j]
        self._first = self._first[:rows]
        self._position[rows:] = 0  # slots without a row read one token

    def advance(self, forward: Forward, tokens: Tensor, positions: Tensor) -> Tensor:
        self._clock += 1
        rows, used = len(tokens), self._clock - min(self._first)
        self._token[:rows] = tokens
        self._position[:rows] = positions[:, 0]
        self._forward = forward
        self._graph(min(bucket(rows, _ROWS), self.slots), min(bucket(used, _COLUMNS), self.columns)).replay()
        assert self._logits is not None
        return self._logits[:rows]

    def clear(self) -> None:
        """Frees the graphs and their tensors."""
        self._graphs.clear()
        self._stores, self._logits = [], None
        for layer in self._fixed:
            layer.forget()
            layer._buffers = None

    def _graph(self, rows: int, columns: int) -> Graph:
        key = rows, columns
        if key not in self._graphs:
            step = partial(self._step, rows, columns)
            self._graphs[key] = self._captured(step)
            while len(self._graphs) > 1 and sum(graph.size for graph in self._graphs.values()) > (self.most or 0):
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _captured(self, step: Callable[[], None]) -> Graph:
        device = self._token.device
        try:
            return Graph(step, device, self._pool, self._is_captured)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or self.most is None:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning(
                "a step of decoding can't be captured as a CUDA graph (%s), so that its kernels are started one by one",
                reason,
            )
            self._is_captured = False
            return Graph(step, device, records=False)

    def _step(self, rows: int, columns: int) -> None:
        """One forward pass of one token in each of the first slots; each column is written at its row's position."""
        position = self._position[:rows]
        for layer in self._fixed:
            layer.place_of_next = self._slot[:rows], position, columns
        mask = self._column[:columns] <= position.unsqueeze(1)
        assert self._forward is not None
        with self.weights():
            logits = self._forward(self, self._token[:rows], position.unsqueeze(1), mask)
        if self._logits is None:
            self._logits = logits.new_zeros((self.slots, logits.shape[-1]))
        self._logits[:rows] = logits

    def _allocate(self) -> None:
        """Allocates keys and values in the shapes of those just read; masked ones must be finite."""
        read = [(layer.keys, layer.values) for layer in self._fixed]
        is_even = len({(keys.shape, values.shape) for keys, values in read}) == 1
        for states in read[:1] if is_even else read:
            for x in states:
                shape = (len(read) if is_even else 1, self.slots, x.shape[1], self.columns, x.shape[3])
                self._stores.append(x.new_zeros(shape))
        for i, layer in enumerate(self._fixed):
            keys, values = self._stores if is_even else self._stores[2 * i : 2 * i + 2]
            layer._buffers = keys[i * is_even], values[i * is_even]

    @property
    def _fixed(self) -> list[FixedLayer]:
        return [layer for layer in self._rows if isinstance(layer, FixedLayer)]


class FixedLayer(RowLayer):
    """One layer's keys and values in tensors that never move."""

    #: Slots and columns of the next tokens, (n,) each, and the number of columns that are read.
    place_of_next: tuple[Tensor, Tensor, int]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token per row, and returns the columns in use of these rows."""
        if not self.is_initialized:
            return super().update(key_states, value_states)
        assert self._buffers is not None
        (keys, values), (slot, column, width) = self._buffers, self.place_of_next
        keys[slot, :, column] = key_states[:, :, 0].to(keys.dtype)
        values[slot, :, column] = value_states[:, :, 0].to(values.dtype)
        return keys[: len(slot), :, :width], values[: len(slot), :, :width]

    def get_seq_length(self) -> int:
        if not self.is_initialized or self._buffers is None or self.keys is not self._buffers[0]:  # prompts are read
            return super().get_seq_length()
        # With one more the mask has all columns in use; the one that the model is given says which count.
        return self.place_of_next[2] - 1

    def place(self, begin: int, kept: Tensor, index: Tensor, length: Tensor, has_read: bool, keep: bool) -> None:
        """Puts rows that continue the kept prompt, and rows that continue prompts just read, after ``begin`` rows."""
        read = (self.keys, self.values) if has_read else None
        if len(kept):
            assert self._kept is not None
            self._write(self._kept, begin, kept, length[: len(kept)])
        if read is not None:
            self._write(read, begin + len(kept), index, length[len(kept) :])
            if keep:
                self._kept = read[0][-1:].clone(), read[1][-1:].clone()
        if not keep:
            self._kept = None
        assert self._buffers is not None
        self.is_initialized, (self.keys, self.values) = True, self._buffers

    def forget(self) -> None:
        """Drops what belongs to one generation."""
        self.is_initialized, self._kept = False, None
        self.keys = self.values = torch.empty(0)

    def _write(self, prompts: tuple[Tensor, Tensor], begin: int, index: Tensor, length: Tensor) -> None:
        """Prompts are padded on the left; their rows begin in column 0."""
        assert self._buffers is not None
        width = prompts[0].shape[-2]
        column = torch.arange(width, device=length.device) + (width - length).unsqueeze(1)
        for buffer, states in zip(self._buffers, prompts, strict=True):
            shifted = states[index.unsqueeze(1), :, column.clamp(max=width - 1)]  # (n, S, heads, size)
            buffer[begin : begin + len(index), :, :width] = shifted.transpose(1, 2)


class CastWeights:
    """Copies of a model's matrices in autocast's dtype, for a graph, which outlives autocast's own casts."""

    def __init__(self, model: nn.Module) -> None:
        kind = next(model.parameters()).device.type
        self._kind, self._dtype = kind, torch.get_autocast_dtype(kind)
        self.places = [
            (module, name, weight, torch.empty_like(weight, dtype=self._dtype, requires_grad=False))
            for module in model.modules()
            if isinstance(module, (nn.Linear, Conv1D))
            for name, weight in module._parameters.items()
            if weight is not None and weight.dtype == torch.float32
        ]

    @property
    def bytes(self) -> int:
        return sum(copy.numel() * copy.element_size() for *_, copy in self.places)

    @torch.no_grad()
    def refresh(self) -> None:
        if self.places:
            torch._foreach_copy_([copy for *_, copy in self.places], [weight for _, _, weight, _ in self.places])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        for module, name, _, copy in self.places:
            module._parameters[name] = copy  # type: ignore[assignment]
        try:
            with torch.autocast(self._kind, self._dtype, cache_enabled=False):
                yield
        finally:
            for module, name, weight, _ in self.places:
                module._parameters[name] = weight
