"""Observation spaces as a convolution sees them."""

import numpy as np
from gymnasium import spaces

#: Pixels a side that the smallest convolutions need.
LEAST_PIXELS = 4


def image_channels(space: spaces.Space) -> int | None:
    """Number of channels where a convolutional encoder reads the space; None where it is no image.

    Images are Boxes of uint8, or of floats in [0, 1] or [0, 255], of two to four dimensions and at least 36 pixels a
    side. A uint8 Box of three dimensions is one from 4 pixels a side.
    """
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        return None
    is_uint8 = space.dtype == np.uint8
    has_pixel_bounds = np.issubdtype(space.dtype, np.floating) and pixel_scale(space) is not None
    shape = image_shape(space)
    if is_uint8 and len(space.shape) == 3:
        return shape[0] if min(shape[1:]) >= LEAST_PIXELS else None
    return shape[0] if (is_uint8 or has_pixel_bounds) and is_large(space) else None


def is_large(space: spaces.Box) -> bool:
    """Returns whether an image has the 36 pixels a side that DQN's convolutions need."""
    return min(image_shape(space)[1:]) >= 36


def image_shape(space: spaces.Box) -> tuple[int, int, int]:
    """Channels, height and width, as a convolution sees the space; frames of a stack count as channels."""
    shape = space.shape
    if len(shape) == 2:
        return 1, *shape
    if len(shape) == 4:  # [stack, H, W, C] or [stack, C, H, W]
        last = shape[-1] < shape[1]
        return (shape[0] * shape[3], shape[1], shape[2]) if last else (shape[0] * shape[1], shape[2], shape[3])
    last = shape[-1] < shape[0]
    return (shape[2], shape[0], shape[1]) if last else (shape[0], shape[1], shape[2])


def pixel_scale(space: spaces.Box) -> float | None:
    """Returns the divisor of pixels, 255 or 1; None if the bounds are not those of an image."""
    low, high = float(space.low.min()), float(space.high.max())
    return high if low == 0 and high in (1.0, 255.0) else None
