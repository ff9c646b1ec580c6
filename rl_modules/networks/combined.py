"""The encoder of observations with several parts."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.networks.encoders import build_encoder, encoding_width


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
