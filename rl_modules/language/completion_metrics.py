"""Statistics of the rewards and lengths of completions."""

import torch
from torch import Tensor


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of elements that are not NaN, their mean, and their standard deviation (0 for one);
    scalars.
    """
    counts = ~x.isnan()
    n = counts.sum()
    mean = torch.where(counts, x, 0.0).sum() / n.clamp(min=1)
    squares = torch.where(counts, (x - mean).square(), 0.0).sum()
    return n, mean, (squares / (n - 1).clamp(min=1)).sqrt()


def length_metrics(length: Tensor, finished: Tensor) -> dict[str, Tensor]:
    """Metrics of the completions' lengths by name.

    Args:
        length: in tokens, [B].
        finished: 1 where a completion ended by itself, 0 where it was truncated, [B].
    """
    return {
        "completions/mean_length": length.mean(),
        "completions/min_length": length.min(),
        "completions/max_length": length.max(),
        "completions/clipped_ratio": 1 - finished.mean(),
    }
