"""Normal distributions of continuous actions."""

import math
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError

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
