"""One choice among several."""

from typing import Any

import torch
from torch import Tensor

from rl_modules.common.masks import mask_logits


class Categorical:
    """One of A actions."""

    def __init__(self, logits: Tensor) -> None:
        self.log_p = torch.log_softmax(logits, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        # Gumbel-max in its exponential form: argmax p / E with E ~ Exp(1) is distributed as p.
        noise = torch.empty_like(self.log_p).exponential_(generator=generator)
        return (self.log_p.detach() - noise.log()).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_p.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_p.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def kl(self, other: Any) -> Tensor:
        return (self.log_p.exp() * (self.log_p - other.log_p)).sum(-1)

    def detach(self) -> "Categorical":
        # log_softmax of log-probabilities is the identity.
        return Categorical(self.log_p.detach())

    def rows(self, rows: Tensor) -> "Categorical":
        return type(self)(self.log_p[rows])

    def masked(self, mask: Tensor) -> "Categorical":
        return MaskedCategorical(mask_logits(self.log_p, mask))

    def parameters(self) -> Tensor:
        return self.log_p.detach()


class MaskedCategorical(Categorical):
    """A :class:`Categorical` of which some options have probability 0."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty_like(self.log_p).exponential_(generator=generator)
        # The generator may return 0, whose logarithm would outweigh any number.
        return (self.log_p.detach() - noise.clamp_min(1e-30).log()).argmax(-1)
