"""Statistics over the transitions of all ranks."""

import torch
from lightning import Trainer
from torch import Tensor, distributed


def is_alone(trainer: Trainer | None) -> bool:
    """Whether one process trains."""
    return trainer is None or trainer.world_size == 1


def std_mean(x: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
    """Standard deviation (unbiased) and mean of a minibatch, scalars.

    Args:
        x: this rank's part, [B], on the strategy's device.
        alone: false where the minibatch is spread over ranks, which call this together.
    """
    if alone:
        return torch.std_mean(x)
    wide = x.double()
    count = torch.full((), float(x.numel()), dtype=torch.float64, device=x.device)
    sums = torch.stack([count, wide.sum(), wide.square().sum()])
    distributed.all_reduce(sums)
    n, total, squares = sums.unbind()
    mean = total / n
    variance = (squares - n * mean**2) / (n - 1)
    return variance.clamp(min=0).sqrt().to(x.dtype), mean.to(x.dtype)


def rank_weight(n: int, device: torch.device) -> float:
    """What to multiply this rank's mean over ``n`` transitions by, so that the mean over ranks is that over all.

    Args:
        n: transitions in this rank's minibatch.
        device: the strategy's.
    """
    total = torch.tensor(float(n), dtype=torch.float32, device=device)
    distributed.all_reduce(total)
    return n * distributed.get_world_size() / float(total)


def largest(n: int, device: torch.device) -> int:
    """The largest ``n`` of all ranks."""
    count = torch.tensor(n, dtype=torch.int64, device=device)
    distributed.all_reduce(count, distributed.ReduceOp.MAX)
    return int(count)
