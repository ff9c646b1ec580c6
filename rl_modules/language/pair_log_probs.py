"""Log-probabilities of pairs of answers by one forward pass, which in packed rows reads their common prompt once."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.logits import logits_at
from rl_modules.language.pair_scores import visible


def pair_log_probs(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log π of every token of the chosen and of the rejected answers.

    Logits are computed for the places that predict an answer's token and no others.

    Args:
        model: causal language model.
        batch: ``tokens`` [rows, width]; ``lengths`` [b, 3], the tokens of prompt, chosen and rejected answer; ``last``
            [2b], the places in ``tokens.flatten()`` of all sequences' last tokens, the chosen ones first. Where rows
            are packed also ``position_ids``, ``segment`` and ``prompt_segment`` [rows, width].

    Returns:
        log π(y_t) in nats, [2b, L] float32, the chosen answers first, 0 after each answer's end; and where a token
        counts, [2b, L] bool.
    """
    tokens, lengths = batch["tokens"], batch["lengths"]
    b, packed = len(lengths), "segment" in batch
    length = torch.cat([lengths[:, 1], lengths[:, 2]])
    width = int(length.max())
    columns = torch.arange(width, device=tokens.device)
    start = batch["last"] - length + 1
    counts = columns < length.unsqueeze(1)
    # Clamped where nothing counts; nothing is read there.
    place = (start.unsqueeze(1) + columns).clamp(max=tokens.numel() - 1)
    target = tokens.flatten()[place]
    # In a packed row the end of the prompt predicts the first token of both answers: its logits are computed once.
    own = counts.clone()
    if packed:
        own[b:, 0] = False
    logits = logits_at(model, place[own] - 1, input_ids=tokens, **_packed_inputs(model, batch))
    values = F.token_log_probs(logits, target[own].unsqueeze(0)).squeeze(0)
    where = own.flatten().nonzero().squeeze(1)
    if packed:
        ends_of_prompts = length[:b].cumsum(0) - length[:b]
        firsts = F.token_log_probs(logits.index_select(1, ends_of_prompts), target[b:, 0].unsqueeze(0)).squeeze(0)
        values = torch.cat([values, firsts])
        where = torch.cat([where, torch.arange(b, 2 * b, device=tokens.device) * width])
    return values.new_zeros(counts.numel()).index_copy(0, where, values).view(counts.shape), counts


def _packed_inputs(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    if "segment" not in batch:
        return {}
    mask = visible(batch["segment"], batch["prompt_segment"]).unsqueeze(1)
    if model.config._attn_implementation == "eager":
        # It adds the mask to its scores.
        dtype = next(model.parameters()).dtype
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        mask = added.masked_fill_(~mask, torch.finfo(dtype).min)
    return {"attention_mask": mask, "position_ids": batch["position_ids"]}
