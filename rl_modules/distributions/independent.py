"""Distributions of several independent components: choices, switches, real numbers."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from rl_modules.common.errors import UsageError
from rl_modules.common.masks import FORBIDDEN
from rl_modules.distributions.categorical import Categorical

LOG_2PI = math.log(2 * math.pi)


class DiagGaussian:
    """Independent normals, for Box actions; densities of the unclipped action."""

    def __init__(self, mean: Tensor, log_std: Tensor, shape: tuple[int, ...] | None = None) -> None:
        self.mean = mean
        self.log_std = log_std
        self.shape = shape

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self._shaped(self.mean.detach() + self.log_std.detach().exp() * noise)

    def mode(self) -> Tensor:
        return self._shaped(self.mean.detach())

    def _shaped(self, action: Tensor) -> Tensor:
        return action if self.shape is None else action.reshape(*action.shape[:-1], *self.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        if self.shape is not None:
            action = action.reshape(self.mean.shape)
        z = (action - self.mean) * torch.exp(-self.log_std)
        return -0.5 * (z * z).sum(-1) - self.log_std.sum(-1) - 0.5 * LOG_2PI * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        per_state = self.log_std.sum(-1) + 0.5 * (1 + LOG_2PI) * self.mean.shape[-1]
        return per_state.expand(self.mean.shape[:-1])

    def kl(self, other: Any) -> Tensor:
        variance_ratio = torch.exp(2 * (self.log_std - other.log_std))
        distance = ((self.mean - other.mean) * torch.exp(-other.log_std)) ** 2
        return 0.5 * (variance_ratio + distance - 1).sum(-1) + (other.log_std - self.log_std).sum(-1)

    def detach(self) -> "DiagGaussian":
        return DiagGaussian(self.mean.detach(), self.log_std.detach(), self.shape)

    def rows(self, rows: Tensor) -> "DiagGaussian":
        return DiagGaussian(self.mean[rows], self.log_std.expand_as(self.mean)[rows], self.shape)

    def masked(self, mask: Tensor) -> "DiagGaussian":
        raise UsageError("action_mask: a Box has no single actions that a mask could forbid; leave it out")

    def parameters(self) -> Tensor:
        return torch.cat([self.mean, self.log_std.expand_as(self.mean)], dim=-1).detach()


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
