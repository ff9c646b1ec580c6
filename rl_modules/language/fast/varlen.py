"""Attention between the tokens of each text of one packed row, which needs no mask: torch's ``varlen_attn`` on CUDA.

Its plain twin, on other devices, calls transformers' sdpa function for each text. That function computes everything
else: texts in rows of their own, given masks, and tokens after a cache.
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_modules.common.errors import UsageError

#: In transformers: it refuses models without sdpa for names that contain this word.
NAME = "sdpa_varlen"


def inputs_of_texts(position_ids: Tensor, longest: int, boundaries: Tensor | None) -> dict[str, Any]:
    """Transformers' keyword arguments that say where the texts of a row [1, T] begin and end, [n + 1] int32.

    Without ``boundaries`` they are found by the positions, for which the host waits for the device.
    """
    if boundaries is None:
        starts = (position_ids.flatten() == 0).nonzero().squeeze(1)
        boundaries = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
    return {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """In place of a packed row's mask [1, 1, T, T] an empty tensor, [1, 1, 0, window], where 0 is no window."""
    is_packed = not (allow_is_causal_skip or use_vmap) and attention_mask is None
    if is_packed and batch_size == 1 and q_length == kv_length > 1:
        return torch.empty(1, 1, 0, local_size or 0, dtype=torch.bool, device=kwargs.get("device"))
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        **kwargs,
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if attention_mask is None or attention_mask.shape[-2] > 0:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    given = {"dropout": dropout or None, **{name: kwargs.get(name) for name in ("softcap", "position_bias", "s_aux")}}
    if unknown := [name for name, x in given.items() if x is not None]:
        raise UsageError(
            f"attn_implementation=varlen has no {unknown[0]} in packed rows, and {type(module).__name__} "
            "has one; set it to 0 in model_config, or take packing=false or sdpa"
        )
    if cu_seq_lens_q is None or max_length_q is None:
        raise UsageError(
            "attn_implementation=varlen: several texts in a row came without cu_seq_lens_q and "
            "max_length_q, which say where they end"
        )
    window = attention_mask.shape[-1]
    texts = cu_seq_lens_q, max_length_q, window, scaling
    return (_by_kernel if query.is_cuda else _text_by_text)(module, query, key, value, *texts), None


def _by_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    window: int,
    scaling: float | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    # A window of n tokens is n - 1 to the left of each; -1 is all of them.
    texts = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(Tensor, texts).unsqueeze(0)


def _text_by_text(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    window: int,
    scaling: float | None,
) -> Tensor:
    found = []
    for start, end in pairwise(ends.tolist()):
        sees = None
        if 0 < window < end - start:
            sees = torch.ones(1, 1, end - start, end - start, dtype=torch.bool, device=query.device)
            sees = sees.tril().triu(1 - window)
        text = slice(None), slice(None), slice(start, end)
        found.append(sdpa_attention_forward(module, query[text], key[text], value[text], sees, scaling=scaling)[0])
    return torch.cat(found, 1)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
