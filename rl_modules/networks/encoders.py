"""Encoders: from one observation space's tensors to one vector per observation."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.arguments import Custom
from rl_modules.common.images import is_large, pixel_scale
from rl_modules.common.spaces import is_image
from rl_modules.networks.features import FeaturesExtractor
from rl_modules.networks.layers import orthogonal
from rl_modules.networks.nature_cnn import NatureCNN, SmallCNN

_extractor: ContextVar[Custom | None] = ContextVar("features_extractor", default=None)


@contextmanager
def extractor_of(given: Custom | None) -> Iterator[None]:
    """Makes :func:`build_encoder` return this feature extractor within the context; None: the project's own."""
    token = _extractor.set(given)
    try:
        yield
    finally:
        _extractor.reset(token)


def build_encoder(space: spaces.Space, features_dim: int = 512) -> nn.Module:
    """Builds the encoder for an observation space, or the user's; its width is ``.out_features``."""
    if (given := _extractor.get()) is not None:
        return FeaturesExtractor(given, space)
    if isinstance(space, spaces.Box) and is_image(space):
        return (NatureCNN if is_large(space) else SmallCNN)(space, features_dim)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return CombinedEncoder(space)
    return VectorEncoder(space)


class VectorEncoder(nn.Module):
    """Encodes observations other than images as a vector, discrete ones one-hot, [B, *space.shape] → [B, width]."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.options: list[int] = []
        self.scale = 1.0
        if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1:
            self.scale = pixel_scale(space) or 1.0
        if isinstance(space, spaces.Discrete):
            self.options = [int(space.n)]
        elif isinstance(space, spaces.MultiDiscrete):
            self.options = [int(n) for n in space.nvec.reshape(-1)]
        self.out_features = sum(self.options) or math.prod(space.shape or ())

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}"

    def forward(self, observation: Tensor) -> Tensor:
        flat = observation.flatten(1) if observation.dim() > 1 else observation[:, None]
        if not self.options:
            flat = flat if flat.is_floating_point() else flat.float()
            return flat if self.scale == 1.0 else flat / self.scale
        # On a CPU torch's `one_hot` reads the choices back to check them; `scatter_` checks them too.
        zeros = (torch.zeros((flat.shape[0], n), dtype=torch.float32, device=flat.device) for n in self.options)
        choices = flat.long().split(1, 1)
        return torch.cat([x.scatter_(1, c, 1.0) for x, c in zip(zeros, choices, strict=True)], dim=1)


def init_orthogonal(encoder: nn.Module) -> None:
    """Sets orthogonal weights in this project's encoders; a user's, which may be pretrained, stay."""
    if not getattr(encoder, "is_users", False):
        orthogonal(encoder)


def encoding_width(encoder: Any) -> int:
    """Width of an encoder's output."""
    return int(encoder.out_features)


class CombinedEncoder(nn.Module):
    """Encodes each part of a Dict or Tuple observation by its own encoder, [B, …] each → [B, out_features]."""

    def __init__(self, space: spaces.Dict | spaces.Tuple, features_dim: int = 256) -> None:
        super().__init__()
        parts = space.items() if isinstance(space, spaces.Dict) else ((str(i), part) for i, part in enumerate(space))
        # A module's name must not contain a dot, but a Dict's key may.
        self.keys = []
        self.encoders = nn.ModuleList()
        for key, part in parts:
            self.keys.append(key)
            self.encoders.append(build_encoder(part, features_dim))
        self.out_features = sum(encoding_width(encoder) for encoder in self.encoders)

    def forward(self, observation: dict[str, Any]) -> Tensor:
        encoded = [encoder(observation[key]) for key, encoder in zip(self.keys, self.encoders, strict=True)]
        return torch.cat(encoded, dim=1)
