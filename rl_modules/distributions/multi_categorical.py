"""Several independent choices."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.distributions.categorical import Categorical


class MultiCategorical:
    """K independent choices, the k-th among ``nvec[k]``."""

    parts: Sequence[Categorical]

    def __init__(self, logits: Tensor, nvec: list[int]) -> None:
        self.nvec = nvec
        self.parts = [Categorical(part) for part in logits.split(nvec, dim=-1)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return torch.stack([part.sample(generator) for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        each = [part.log_prob(choice) for part, choice in zip(self.parts, action.unbind(-1), strict=True)]
        return torch.stack(each).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Any) -> Tensor:
        return torch.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]).sum(0)

    def detach(self) -> "MultiCategorical":
        return MultiCategorical(self.parameters(), self.nvec)

    def rows(self, rows: Tensor) -> "MultiCategorical":
        chosen = copy.copy(self)
        chosen.parts = [part.rows(rows) for part in self.parts]
        return chosen

    def masked(self, mask: Tensor) -> "MultiCategorical":
        masked = copy.copy(self)
        masked.parts = [p.masked(m) for p, m in zip(self.parts, mask.split(self.nvec, dim=-1), strict=True)]
        return masked

    def parameters(self) -> Tensor:
        return torch.cat([part.log_p.detach() for part in self.parts], dim=-1)
