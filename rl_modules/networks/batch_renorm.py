"""Batch renormalization, and networks with it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce

#: Bounds of the correction from a batch's statistics to the running ones, as in sb3-contrib.
R_MAX, D_MAX = 3.0, 5.0


class BatchRenorm(nn.Module):
    """Normalises each feature over the batch, and corrects towards the running statistics.

    Ioffe 2017, arXiv:1702.03275. With mean μ_B and standard deviation σ_B of the batch, and μ, σ of the batches so far,

        x̂ = (x - μ_B) / σ_B · r + d,   r = clip(σ_B / σ, 1/3, 3),   d = clip((μ_B - μ) / σ, -5, 5),   y = scale x̂ + bias

    without gradient through r and d. In the first ``warmup_steps`` batches r = 1 and d = 0: batch normalisation. Inside
    :func:`batch_statistics` the layer does this and updates μ and σ; elsewhere it is the fixed map (x - μ) / σ, in
    training mode too. Ranks normalise by the batch of all of them.

    Shape: [B, F] → [B, F], or [K, B, F] → [K, B, F]. Statistics are computed in float32.
    """

    mean: Tensor
    variance: Tensor
    n_batches: Tensor

    def __init__(
        self,
        features: int,
        k: int | None = None,
        momentum: float = 0.01,
        eps: float = 1e-3,
        warmup_steps: int = 100_000,
    ) -> None:
        super().__init__()
        shape = (1, features) if k is None else (k, 1, features)
        self.scale = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("n_batches", torch.zeros((), dtype=torch.int64))
        self.momentum, self.eps, self.warmup_steps = momentum, eps, warmup_steps
        #: Whether the layer normalises by the batch.
        self.uses_batch = False

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if not self.uses_batch:
            slope = self.scale * (self.variance + self.eps).rsqrt()
            return torch.addcmul(self.bias - self.mean * slope, wide, slope).to(x.dtype)
        n = x.shape[-2] * _world_size()
        mean = _over_ranks(wide.mean(-2, keepdim=True))
        centered = wide - mean
        variance = _over_ranks(centered.square().mean(-2, keepdim=True)) * (n / max(n - 1, 1))
        std = (variance + self.eps).sqrt()
        r, d = self._correction(mean.detach(), std.detach())
        self._remember(mean.detach(), variance.detach())
        return (self.scale * (centered * (r / std) + d) + self.bias).to(x.dtype)

    def _correction(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        running = (self.variance + self.eps).sqrt()
        is_warm = self.n_batches > self.warmup_steps  # a tensor: a device is not waited for
        r = torch.where(is_warm, (std / running).clamp(1 / R_MAX, R_MAX), 1.0)
        d = torch.where(is_warm, ((mean - self.mean) / running).clamp(-D_MAX, D_MAX), 0.0)
        return r, d

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
        self.variance.lerp_(variance.to(self.variance.dtype), self.momentum)
        self.n_batches += 1


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Makes a module's :class:`BatchRenorm` layers normalise by the batch and update their statistics."""
    layers = [part for part in module.modules() if isinstance(part, BatchRenorm)]
    for layer in layers:
        layer.uses_batch = True
    try:
        yield
    finally:
        for layer in layers:
            layer.uses_batch = False


def renormalized(trunk: nn.Sequential, momentum: float, eps: float, warmup_steps: int) -> nn.Sequential:
    """Inserts a :class:`BatchRenorm` before each linear layer of an MLP and after the last activation."""
    parts: list[nn.Module] = []
    width = None
    for part in trunk:
        if isinstance(part, nn.Linear):
            parts.append(BatchRenorm(part.in_features, None, momentum, eps, warmup_steps))
            width = part.out_features
        parts.append(part)
    if width is not None:
        parts.append(BatchRenorm(width, None, momentum, eps, warmup_steps))
    return nn.Sequential(*parts)


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _over_ranks(x: Tensor) -> Tensor:
    """Returns the mean over ranks, differentiable."""
    return x if _world_size() == 1 else all_reduce(x) / _world_size()
