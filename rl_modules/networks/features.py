"""A user's feature extractor, and observations as it receives them."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as nnf

from rl_modules.common.arguments import Custom
from rl_modules.common.images import pixel_scale
from rl_modules.common.spaces import is_image
from rl_modules.networks.imported import check_shape, in_dtype_of, make


class FeaturesExtractor(nn.Module):
    """A user's feature extractor, called as in Stable-Baselines3: ``cls(observation_space, **init_args)``.

    It receives float observations as in SB3: images divided by 255, Discrete and MultiDiscrete one-hot, a Dict as a
    dictionary. Its ``features_dim`` is the width of its output.

    Shape: [B, *obs] → [B, features_dim].
    """

    #: Networks built on it do not initialise its weights.
    is_users = True

    def __init__(self, given: Custom, space: spaces.Space) -> None:
        super().__init__()
        self.space = space
        self.extractor = make("features_extractor", given, space)
        self.out_features = int(self.extractor.features_dim)  # type: ignore[arg-type]
        check_shape("features_extractor", self, (2, self.out_features), space)

    def forward(self, observation: Any) -> Tensor:
        return self.extractor(in_dtype_of(self.extractor, as_floats(observation, self.space)))


def as_floats(observation: Any, space: spaces.Space) -> Any:
    """Converts a batch of observations to floats, [B, …]: pixels to [0, 1], discrete values to one-hot vectors."""
    if isinstance(space, spaces.Dict):
        return {name: as_floats(observation[name], part) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): as_floats(observation[str(i)], part) for i, part in enumerate(space)}
    if isinstance(space, spaces.Discrete):
        return nnf.one_hot(observation.long().reshape(-1), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        choices = observation.long().flatten(1).unbind(1)
        options = space.nvec.reshape(-1).tolist()
        return torch.cat([nnf.one_hot(x, n) for x, n in zip(choices, options, strict=True)], 1).float()
    x = observation if observation.is_floating_point() else observation.float()
    if isinstance(space, spaces.Box) and is_image(space):
        x = x / (pixel_scale(space) or 255.0)
    return x
