"""Decoding in which all completions of a prompt share one copy of its keys and values.

With a cache row per completion, each step reads a prompt once per completion, and memory reads take most of a step's
time on a CPU. Here one matrix product multiplies a prompt's keys with the queries of all its completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_modules.language.fast.grouped_attention import attention_of
from rl_modules.language.row_cache import Parked, RowCache

if TYPE_CHECKING:
    from rl_modules.language.sampling.decode import Prompts

_NAME = "shared_prompts"
_current: ContextVar[SharedPromptCache] = ContextVar("cache of the decoding under way")


class SharedPromptCache(RowCache):
    """Keys and values of each prompt once, and of each row's new tokens.

    A model that changes them after the cache (multi-head latent attention) can't share them; this is detected while the
    first prompts run, and the cache works as a :class:`RowCache`.
    """

    #: (n,): the prompt of each row.
    source: Tensor
    #: (n,): each row's place among ``width`` places of its prompt.
    place: Tensor
    width: int

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        #: Per layer, keys and values (U, heads, S, head size); empty while they are not shared.
        self.prompts: list[tuple[Tensor, Tensor]] = []
        #: (U, 1, 1, S): true in the prompts' padding; None where there is none.
        self.padding: Tensor | None = None
        #: (n, 1, 1, t): true in columns before a row's own tokens; None where there are none.
        self.holes: Tensor | None = None
        #: Layers whose attention got what the cache holds.
        self.direct: set[int] = set()
        self._kept: int | None = None
        #: Rows that were taken out, whose prompts are kept.
        self._parked: list[Parked] = []

    def admit(self, prompts: Prompts, kept_rows: int, keep: bool, room: int) -> None:
        if len(self.direct) < len(self._rows):
            super().admit(prompts, kept_rows, keep, room)
            return
        source = prompts.source
        if self.reading:
            first = bool(kept_rows)
            source = source + (len(self.prompts[0][0]) - first if self.prompts else 0)
            self._add_prompts(prompts.mask[first:], all_whole=len(set(prompts.lengths[first:])) == 1)
        if kept_rows:
            assert self._kept is not None
            source = torch.cat([torch.full_like(source[:kept_rows], self._kept), source[kept_rows:]])
        for layer in self._rows:
            layer.append_empty(len(source), room)
        if keep and self.reading:
            self._kept = len(self.prompts[0][0]) - 1
        elif not keep:
            self._kept = None
        self.reading = False
        before = self._first
        self._place([*before, *[self._clock] * len(source)])
        self._arrange(torch.cat([self.source, source]) if before else source)

    def step(self) -> Tensor | None:
        mask = super().step()
        if not self.prompts:
            return mask
        self.holes = None if mask is None else ~mask[:, None, None]
        return None

    def replace(self, holes: list[int], movers: list[int], rows: int) -> None:
        super().replace(holes, movers, rows)
        if self.prompts and rows:
            source = self.source.clone()
            source[holes] = source[movers]
            self._arrange(source[:rows])

    def take_out(self, rows: list[int]) -> list[Parked]:
        parked = super().take_out(rows)
        if self.prompts:
            for row, place in zip(parked, self.source[rows].tolist(), strict=True):
                row.source = place
            self._parked += parked
        return parked

    def put_back(self, parked: Sequence[Parked], room: int) -> None:
        before = bool(self._first)
        super().put_back(parked, room)
        if self.prompts:
            source = torch.tensor([row.source for row in parked], device=self.source.device)
            self._parked = [row for row in self._parked if row not in parked]
            self._arrange(torch.cat([self.source, source]) if before else source)

    @contextmanager
    def attention(self, model: Any) -> Iterator[None]:
        token = _current.set(self)
        try:
            with attention_of(model, _NAME), super().attention(model):
                yield
        finally:
            _current.reset(token)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that have been seen, padding included."""
        shared = self.prompts[layer_idx][0].shape[-2] if self.prompts and not self.reading else 0
        return shared + super().get_seq_length(layer_idx)

    def _add_prompts(self, mask: Tensor, all_whole: bool) -> None:
        """Appends prompts that have been read to the existing ones."""
        # The model stores them by token, but every step reads them by head.
        read = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in self._rows]
        mask = mask[:, mask.shape[1] - read[0][0].shape[-2] :]
        if not self.prompts:
            self.prompts, self.padding = read, None if all_whole else ~mask[:, None, None]
            return
        old, new = self.prompts[0][0].shape[-2], mask.shape[1]
        if self.padding is not None or old != new or not all_whole:
            known = self.padding
            if known is None:
                known = mask.new_zeros((len(self.prompts[0][0]), 1, 1, old))
            both = known, ~mask[:, None, None]
            self.padding = torch.cat([pad(part, (max(old, new) - part.shape[-1], 0), value=True) for part in both])
        self.prompts = [
            (_one_above(keys, more_keys), _one_above(values, more_values))
            for (keys, values), (more_keys, more_values) in zip(self.prompts, read, strict=True)
        ]

    def _arrange(self, source: Tensor) -> None:
        """Assigns each row a place by its prompt. Prompts without rows are dropped once they are half of all."""
        kept = [*([] if self._kept is None else [self._kept]), *[row.source for row in self._parked]]
        used = torch.cat([source, source.new_tensor(kept)]).unique()
        if 2 * len(used) <= len(self.prompts[0][0]):
            self.prompts = [(keys[used], values[used]) for keys, values in self.prompts]
            self.padding = None if self.padding is None else self.padding[used]
            source = torch.searchsorted(used, source)
            if self._kept is not None:
                self._kept = int(torch.searchsorted(used, self._kept))
            for row in self._parked:
                row.source = int(torch.searchsorted(used, row.source))
        ordered, order = source.sort(stable=True)
        rank = torch.arange(len(source), device=source.device) - torch.searchsorted(ordered, ordered)
        self.source, self.width = source, int(rank.max()) + 1
        self.place = torch.empty_like(order).scatter_(0, order, rank)


def _one_above(first: Tensor, second: Tensor) -> Tensor:
    """Prompts' keys or values as one tensor, padded on the left."""
    width = max(first.shape[2], second.shape[2])
    return torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in (first, second)])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes attention for transformers: by its own sdpa until the prompts are shared."""
    cache, index = _current.get(), int(module.layer_idx)  # type: ignore[arg-type]
    if cache.prompts and not cache.reading:
        prompt_key, prompt_value = cache.prompts[index]
        return _attend(cache, prompt_key, prompt_value, query, key, value, kwargs.get("scaling")), None
    layer = cache._rows[index]
    if key is layer.keys and value is layer.values and kwargs.get("position_bias") is None:
        cache.direct.add(index)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _attend(
    cache: SharedPromptCache,
    prompt_key: Tensor,
    prompt_value: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
) -> Tensor:
    """One new token per row attends to its prompt and to its row: one softmax, and for each part its products."""
    rows, heads, _, size = query.shape
    prompts, key_heads, length, _ = prompt_key.shape
    per_key = heads // key_heads

    def by_prompt(x: Tensor) -> Tensor:
        """(n, key heads, per key, ...) to (U, key heads, width · per key, ...); places without a row hold 0."""
        places = x.new_zeros((prompts, key_heads, cache.width, per_key, x.shape[-1]))
        places[cache.source, :, cache.place] = x
        return places.flatten(2, 3)

    def by_row(x: Tensor) -> Tensor:
        """The inverse of by_prompt."""
        return x.unflatten(2, (cache.width, per_key))[cache.source, :, cache.place]

    asked = query.reshape(rows, key_heads, per_key, size) * (size**-0.5 if scaling is None else scaling)
    shared = by_prompt(asked) @ prompt_key.transpose(2, 3)
    if cache.padding is not None:
        shared = shared.masked_fill(cache.padding, -torch.inf)
    # A row's keys lie in a buffer with room: products of bfloat16 across such gaps are several times slower.
    own = asked @ key.contiguous().transpose(2, 3)
    if cache.holes is not None:
        own = own.masked_fill_(cache.holes, -torch.inf)
    scores = torch.cat([by_row(shared), own], -1)
    weight = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    result = by_row(by_prompt(weight[..., :length]) @ prompt_value) + weight[..., length:] @ value
    return result.reshape(rows, 1, heads, -1)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
