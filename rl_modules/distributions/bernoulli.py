"""K independent switches."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from rl_modules.common.masks import FORBIDDEN


class Bernoulli:
    """K independent switches, for MultiBinary actions."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.empty_like(self.logits).uniform_(generator=generator)
        return (uniform < self.logits.detach().sigmoid()).long()

    def mode(self) -> Tensor:
        return (self.logits > 0).long()

    def log_prob(self, action: Tensor) -> Tensor:
        # log σ(z) for ones, log σ(-z) for zeros.
        return nnf.logsigmoid(torch.where(action.bool(), self.logits, -self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        z = self.logits
        return -(z.sigmoid() * nnf.logsigmoid(z) + (-z).sigmoid() * nnf.logsigmoid(-z)).sum(-1)

    def kl(self, other: Any) -> Tensor:
        z, w = self.logits, other.logits
        ones = z.sigmoid() * (nnf.logsigmoid(z) - nnf.logsigmoid(w))
        zeros = (-z).sigmoid() * (nnf.logsigmoid(-z) - nnf.logsigmoid(-w))
        return (ones + zeros).sum(-1)

    def detach(self) -> "Bernoulli":
        return Bernoulli(self.logits.detach())

    def rows(self, rows: Tensor) -> "Bernoulli":
        return Bernoulli(self.logits[rows])

    def masked(self, mask: Tensor) -> "Bernoulli":
        allowed = mask.bool().unflatten(-1, (-1, 2))
        off, on = allowed.unbind(-1)
        logits = torch.where(off & ~on, FORBIDDEN, self.logits)
        return Bernoulli(torch.where(on & ~off, -FORBIDDEN, logits))

    def parameters(self) -> Tensor:
        return self.logits.detach()
