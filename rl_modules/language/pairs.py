"""Log-probabilities and scores of pairs of answers by one forward pass, which in packed rows reads their common prompt
once.
"""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.critics import scores_at
from rl_modules.language.scoring import logits_at


def pair_log_probs(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log π of every token of the chosen and of the rejected answers of a
    :class:`~rl_modules.language.contract.PairBatch`, from the logits of their places only: in nats, [2b, L] float32,
    the chosen answers first, 0 after each answer's end; and where a token counts, [2b, L] bool.
    """
    tokens, lengths = batch["tokens"], batch["lengths"]
    b, packed = len(lengths), "segment" in batch
    length = torch.cat([lengths[:, 1], lengths[:, 2]])
    on_host = length.cpu()  # the only wait for the device: shapes are computed from it
    width = int(on_host.max())
    start = batch["last"] - length + 1
    columns = torch.arange(width)
    own = counts = columns < on_host.unsqueeze(1)
    # In a packed row the end of the prompt predicts the first token of both answers: its logits are computed once.
    if packed:
        own = counts.clone()
        own[b:, 0] = False
    where = own.flatten().nonzero().squeeze(1)
    where, columns, counts = (x.to(tokens.device, non_blocking=True) for x in (where, columns, counts))
    place, text = start.unsqueeze(1) + columns, tokens.flatten()
    at = place.flatten()[where]
    inputs = batch["images"].inputs(model, tokens) if "images" in batch else {"input_ids": tokens}
    logits = logits_at(model, at - 1, **inputs, **packed_inputs(model, batch))
    values = F.token_log_probs(logits, text[at].unsqueeze(0)).squeeze(0)
    if packed:
        ends_of_prompts = length[:b].cumsum(0) - length[:b]
        firsts = F.token_log_probs(logits.index_select(1, ends_of_prompts), text[start[b:]].unsqueeze(0)).squeeze(0)
        values = torch.cat([values, firsts])
        where = torch.cat([where, torch.arange(b, 2 * b, device=tokens.device) * width])
    return values.new_zeros(counts.numel()).index_copy(0, where, values).view(counts.shape), counts


def pair_scores(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Raw scores of the chosen and of the rejected answers, [b] float32 each, by a model with a ``score`` head."""
    chosen, rejected = scores_at(model, batch["tokens"], batch["last"], **packed_inputs(model, batch)).chunk(2)
    return chosen, rejected


def packed_inputs(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """``attention_mask`` [rows, 1, width, width] and ``position_ids`` [rows, width] of packed rows, otherwise none."""
    if "segment" not in batch:
        return {}
    mask = visible(batch["segment"], batch["prompt_segment"]).unsqueeze(1)
    if model.config._attn_implementation == "eager":
        # It adds the mask to its scores.
        dtype = next(model.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return {"attention_mask": mask, "position_ids": batch["position_ids"]}


def visible(segment: Tensor, prompt_segment: Tensor) -> Tensor:
    """Which tokens each reads, [rows, width, width] bool: earlier ones of its ``segment`` and ``prompt_segment``."""
    width = segment.shape[1]
    keys = segment.unsqueeze(1)
    sees = (keys == segment.unsqueeze(2)) | (keys == prompt_segment.unsqueeze(2))
    return sees & torch.ones(width, width, dtype=torch.bool, device=segment.device).tril()
