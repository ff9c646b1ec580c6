"""Row numbers on a device."""

import torch
from torch import Tensor


def on(device: torch.device, numbers: list[int]) -> Tensor:
    """Integers on a device, without waiting for it."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
