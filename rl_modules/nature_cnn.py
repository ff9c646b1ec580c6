"""The convolutional encoder of images."""

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import image_shape, pixel_scale


class NatureCNN(nn.Module):
    """The convolutional encoder of DQN.

    Args:
        space: an image, see :func:`rl_modules.common.spaces.image_channels`: uint8 or float, with or without a
            channel dimension, or a stack of colour frames, whose channels are joined.
        features_dim: width of the output.

    Shape: [B, *space.shape] → [B, features_dim].

    Raises:
        UsageError: an image under 36×36 pixels, which the three convolutions would shrink to nothing.

    Source: Mnih et al. 2015, Nature 518, "Methods".
    """

    def __init__(self, space: spaces.Box, features_dim: int = 512) -> None:
        super().__init__()
        self.image_ndim = len(space.shape)
        self.channels_last = self.image_ndim > 2 and space.shape[-1] < space.shape[-3]
        self.scale = pixel_scale(space) or 255.0
        channels, height, width = image_shape(space)
        if min(height, width) < 36:
            raise UsageError(f"the image observation is {height}×{width} pixels; NatureCNN needs at least 36×36 "
                             "(wrap the environment in gymnasium.wrappers.ResizeObservation)")  # fmt: skip
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.out_features = features_dim
        self.head = nn.Sequential(nn.Linear(flat, features_dim), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        if self.channels_last:
            image = image.movedim(-1, -3)
        if self.image_ndim == 2:
            image = image.unsqueeze(1)
        elif self.image_ndim == 4:
            image = image.flatten(1, 2)
        return self.head(self.convolutions(image.to(next(self.head.parameters()).dtype) / self.scale))
