"""Rows of a rollout: their tokens, their lengths, and the width of each field.

A rollout's ``tokens`` are as wide as its longest row, what belongs to the completions' tokens (``log_prob``, ``mask``,
``advantage`` …) as its longest completion. Every function here returns fields of exactly that width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError

#: Tokens of the shortest prompt, of the longest row, and of the longest completion of a batch.
Extent = tuple[int, int, int]
#: Two-dimensional fields whose columns are no completion tokens.
_OTHER_COLUMNS = frozenset({"tokens", "rewards", "correct", "kept"})


def require_rewards(rewards: Any, n: int, policy: Any) -> Tensor:
    """Checks what a policy's ``rewards`` returned: [n], of a policy that takes rewards per token also [n, L]."""
    dims = (1, 2) if getattr(policy, "takes_token_rewards", False) else (1,)
    if isinstance(rewards, Tensor) and rewards.ndim in dims and len(rewards) == n:
        return rewards
    got = f"shape {tuple(rewards.shape)}" if isinstance(rewards, Tensor) else f"a {type(rewards).__name__}"
    raise UsageError(
        f"{type(policy).__name__}.rewards returned {got} for {n} completions; return a tensor with one "
        f"number for each, [{n}]"
    )


def joined_sequences(prompts: list[list[int]], written: Any, num_generations: int, pad_id: int) -> dict[str, Tensor]:
    """Prompts and completions as right-padded ``tokens`` [B, T], with ``prompt_length`` [B] and ``length`` [B]."""
    device, longest, length = written.tokens.device, max(len(p) for p in prompts), written.length.cpu()
    before = torch.tensor([len(p) for p in prompts]).repeat_interleave(num_generations)
    padded = torch.tensor([p + [pad_id] * (longest - len(p)) for p in prompts]).repeat_interleave(num_generations, 0)
    width = int((before + length).max())
    row, column = (torch.arange(int(length.max())) < length.unsqueeze(1)).nonzero(as_tuple=True)
    sent = (before, padded, row, column, before[row] + column)
    prompt_length, padded, row, column, place = (x.to(device, non_blocking=True) for x in sent)
    tokens = torch.full((len(prompt_length), width), pad_id, dtype=torch.long, device=device)
    tokens[:, :longest] = padded[:, :width]
    tokens[row, place] = written.tokens[row, column]
    return {"tokens": tokens, "prompt_length": prompt_length, "length": written.length}


@dataclass(frozen=True)
class RowLengths:
    """Lengths of a rollout's rows on the host, so that choosing rows does not wait for the device."""

    prompt: list[int]
    completion: list[int]
    #: Of both together.
    total: list[int]
    #: Whether a row contributes to the gradient, so that it needs a forward pass.
    keep: list[bool]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "RowLengths":
        """Copies them from the device, once."""
        keep = fields.get("keep", torch.ones_like(fields["length"]))
        table = torch.stack([fields["prompt_length"], fields["length"], keep.to(fields["length"])]).tolist()
        return cls(table[0], table[1], list(map(sum, zip(*table[:2], strict=True))), [bool(flag) for flag in table[2]])

    def extent(self, rows: Sequence[int]) -> Extent:
        """Tokens of the shortest prompt, of the longest row, and of the longest completion among some rows."""
        return (
            min(self.prompt[row] for row in rows),
            max(self.total[row] for row in rows),
            max(self.completion[row] for row in rows),
        )


def cut(fields: dict[str, Any], extent: Extent, before: int) -> dict[str, Any]:
    """Fields without the columns after the longest row; per-token fields are ``before`` columns wide so far."""
    _, total, width = extent
    result = dict(fields)
    for name, value in fields.items():
        if name == "tokens":
            result[name] = value[:, :total]
        elif isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == before and name not in _OTHER_COLUMNS:
            result[name] = value[:, :width]
    return result
