"""Evaluation of given texts by a model: log-probabilities of completions, scores of sequences, values of tokens.

Tokens are [b, T], prompts with their completions; prompt_length and length are [b] and at least 1; masks and results
are [b, L] with L the longest completion.

Sequences are right-padded. With causal attention no token attends to tokens on its right, so padding needs no attention
mask, and positions count from 0 by default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.language.architecture import transformers_model
from rl_modules.language.logits import is_large, log_probs_at

if TYPE_CHECKING:
    from rl_modules.language.sampling.support import Filter

#: Tokens of the shortest prompt, of the longest row, and of the longest completion. If they are known from the shapes
#: of a batch, no synchronisation with the device is needed.
Extent = tuple[int, int, int]


def extent_of(prompt_length: Tensor, length: Tensor) -> Extent:
    """Returns the extent of a batch, by one transfer from the device."""
    first, last, width = torch.stack([prompt_length.min(), (prompt_length + length).max(), length.max()]).tolist()
    return first, last, width


def extent_in(batch: dict[str, Any]) -> Extent | None:
    """Returns the extent of a training batch, read off its shapes; None for a batch without ``shortest_prompt``."""
    first = batch.get("shortest_prompt")
    return None if first is None else (first, batch["tokens"].shape[1], batch["mask"].shape[1])


def completion_positions(prompt_length: Tensor, length: Tensor, width: int | None = None) -> Tensor:
    """Positions of each completion's tokens in their sequences, [b, L]; after its end the last place is repeated."""
    columns = torch.arange(int(length.max()) if width is None else width, device=length.device)
    return prompt_length.unsqueeze(1) + torch.minimum(columns, length.unsqueeze(1) - 1)


def completion_log_probs(
    model: Any,
    tokens: Tensor,
    prompt_length: Tensor,
    length: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    extent: Extent | None = None,
    filtered: Filter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log π of every completion token in nats, and with ``entropy`` their entropies, [b, L] float32, 0 after each end.

    Tokens are [b, T]; ``temperature`` and ``filtered`` are those of sampling. ``extent`` None asks the device for it.
    """
    first, last, width = extent_of(prompt_length, length) if extent is None else extent
    counts = completion_mask(length, width)
    if filtered is not None or is_large(len(tokens) * (last - first), model):
        return _counted_log_probs(model, tokens[:, :last], prompt_length, counts, temperature, entropy, filtered)
    place = completion_positions(prompt_length, length, width)
    # Logits at t - 1 predict the token at t, so the last token's logits are not needed.
    judging = torch.arange(first - 1, last - 1, device=tokens.device)
    logits = model(input_ids=tokens[:, : last - 1], logits_to_keep=judging, use_cache=False).logits
    log_prob = F.token_log_probs(logits, tokens[:, first:last], temperature)
    aligned = torch.where(counts, log_prob.gather(1, place - first), 0.0)
    if not entropy:
        return aligned, None
    spread = F.token_entropy(logits, temperature)
    return aligned, torch.where(counts, spread.gather(1, place - first), 0.0)


def _counted_log_probs(
    model: Any, tokens: Tensor, prompt_length: Tensor, counts: Tensor, temperature: float, entropy: bool,
    filtered: Filter | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes the same from the counted tokens' places only, [b, L], to save work and memory in the output layer."""
    row, column = counts.nonzero(as_tuple=True)
    at = prompt_length[row] + column
    inputs = tokens[:, :-1]
    process = None if filtered is None else filtered.at(tokens, prompt_length, row, column)
    found = log_probs_at(
        model, row * inputs.shape[1] + at - 1, tokens[row, at], temperature, entropy, process=process, input_ids=inputs
    )  # fmt: skip
    aligned = [
        None if x is None else placed(x[0], row * counts.shape[1] + column, counts.shape) for x in found[:2]
    ]  # fmt: skip
    assert aligned[0] is not None
    return aligned[0], aligned[1]


def placed(values: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    """Values at flat places of a tensor that holds 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_copy(0, where, values).view(shape)


def completion_mask(length: Tensor, width: int | None = None) -> Tensor:
    """True for the tokens of each completion, [b, L]."""
    columns = torch.arange(int(length.max()) if width is None else width, device=length.device)
    return columns < length.unsqueeze(1)


def written_mask(rollout: dict[str, Any]) -> Tensor:
    """True for the tokens that the model wrote: all of a completion, or its turns of a dialogue, [b, L]."""
    mask = completion_mask(rollout["length"], rollout["log_prob"].shape[1])
    return mask & rollout["written"] if "written" in rollout else mask


def tokens_written(rollout: dict[str, Any]) -> Tensor:
    """Tokens of each completion that the model wrote, [b]."""
    return rollout["written"].sum(1) if "written" in rollout else rollout["length"]


def token_values(model: Any, tokens: Tensor, prompt_length: Tensor, length: Tensor, width: int | None = None) -> Tensor:
    """Computes V of the state before each completion token, which is the text up to there, [b, L] float32."""
    place = completion_positions(prompt_length, length, width) - 1
    return score_head(model, _gather_states(_hidden(model, tokens), place)).squeeze(-1).float()


def sequence_scores(model: Any, tokens: Tensor, total_length: Tensor) -> Tensor:
    """Returns the score of each sequence, [b] float32, read at its last token by length, not by a pad id."""
    states = _gather_states(_hidden(model, tokens), total_length.unsqueeze(1) - 1)
    return score_head(model, states).view(-1).float()


def scores_at(model: Any, tokens: Tensor, place: Tensor, **inputs: Any) -> Tensor:
    """Computes scores of the text up to some places of a batch, [m] float32."""
    states = _hidden(model, tokens, **inputs).flatten(0, 1).index_select(0, place)
    return score_head(model, states).view(-1).float()


def score_head(model: Any, states: Tensor) -> Tensor:
    """The head's output for hidden states, [..., 1], in its own dtype, which autocast would round."""
    head = transformers_model(model).score
    dtype = next((p.dtype for p in head.parameters() if p.requires_grad), next(head.parameters()).dtype)
    with torch.autocast(states.device.type, enabled=False):
        return head(states.to(dtype))


def _hidden(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Returns the last layer's states, [b, T, hidden]."""
    return transformers_model(model).base_model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state


def _gather_states(states: Tensor, place: Tensor) -> Tensor:
    return states.gather(1, place.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
