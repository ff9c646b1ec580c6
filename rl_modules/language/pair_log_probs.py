"""Log-probabilities of pairs of answers by one forward pass, which in packed rows reads their common prompt once."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.logits import logits_at
from rl_modules.language.pair_scores import visible


@torch.no_grad()
def can_pack_pairs(model: Any) -> bool:
    """Whether answers in packed rows have the log-probabilities that each has alone: computed for two pairs.

    Args:
        model: causal language model.
    """
    config = model.config
    windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    # Windows and chunks are longer than what is compared here; other kernels have rules of their own about masks.
    if windows or getattr(config, "attention_chunk_size", None) or config._attn_implementation not in ("sdpa", "eager"):
        return False
    weight = next(model.parameters())
    lengths = torch.tensor([[3, 2, 3], [2, 4, 1]], device=weight.device)
    sizes = lengths.flatten()
    tokens = torch.arange(int(sizes.sum()), device=weight.device) * 7 % config.get_text_config().vocab_size
    segment = torch.arange(6, device=weight.device).repeat_interleave(sizes)
    pieces = tokens.split(sizes.tolist())
    position = [torch.arange(len(p), device=weight.device) for p in pieces]
    for i, prompt in ((1, 3), (2, 3), (4, 2), (5, 2)):
        position[i] = position[i] + prompt
    packed = {
        "tokens": tokens.unsqueeze(0), "lengths": lengths,
        "last": (sizes.cumsum(0) - 1).view(2, 3)[:, 1:].T.flatten(),  # chosen answers, then rejected ones
        "position_ids": torch.cat(position).unsqueeze(0), "segment": segment.unsqueeze(0),
        "prompt_segment": (segment // 3 * 3).unsqueeze(0),
    }  # fmt: skip
    training = model.training
    model.eval()
    try:
        together = pair_log_probs(model, packed)[0].sum(-1)
        alone = torch.stack([_alone(model, pieces[p], pieces[a]) for p, a in ((0, 1), (3, 4), (0, 2), (3, 5))])
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        # What a model says that takes no mask of this shape, or no positions.
        return False
    finally:
        model.train(training)
    # A token that sees another text, or the wrong position, is off by more than rounding.
    rounding = 1e-3 if weight.dtype is torch.float32 else 0.1
    return bool((together - alone).abs().max() < rounding)


def _alone(model: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    logits = model(input_ids=torch.cat([prompt, answer]).unsqueeze(0), use_cache=False).logits
    return F.token_log_probs(logits[:, len(prompt) - 1 : -1], answer.unsqueeze(0)).sum()


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
