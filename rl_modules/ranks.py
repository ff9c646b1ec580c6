"""Statistics over the transitions of all ranks, and each rank's part of a checkpoint."""

import multiprocessing
import weakref
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, distributed

from rl_modules.common.errors import UsageError

#: The default group and the gloo group made for it; torch drops the second when it destroys the first.
_gloo_group: tuple[Any, Any] = (lambda: None, lambda: None)


def is_alone(trainer: Trainer | None) -> bool:
    """Returns whether one process trains."""
    return trainer is None or trainer.world_size == 1


def std_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviation (unbiased) and mean of the minibatches of all ranks, scalars."""
    wide = x.double()
    count = torch.full((), float(x.numel()), dtype=torch.float64, device=x.device)
    sums = torch.stack([count, wide.sum(), wide.square().sum()])
    distributed.all_reduce(sums)
    n, total, squares = sums.unbind()
    mean = total / n
    variance = (squares - n * mean**2) / (n - 1)
    return variance.clamp(min=0).sqrt().to(x.dtype), mean.to(x.dtype)


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """``F.explained_variance`` over the transitions of all ranks, a scalar."""
    wide = torch.stack([returns - value, returns]).detach().double().flatten(1)
    sums = torch.cat([wide.sum(1), torch.full((1,), float(returns.numel()), dtype=torch.float64, device=wide.device)])
    distributed.all_reduce(sums)
    # Centred, because the squares of constant returns would leave a rounding error as the divisor.
    squares = (wide - (sums[:2] / sums[2]).unsqueeze(1)).square().sum(1)
    distributed.all_reduce(squares)
    left, total = squares.to(value.dtype).unbind()
    return torch.where(total == 0, torch.nan, 1 - left / total)


def rank_weight(n: int, device: torch.device) -> float:
    """Returns the factor on this rank's mean over ``n`` transitions that makes the mean over ranks that over all."""
    total = torch.tensor(float(n), dtype=torch.float32, device=device)
    distributed.all_reduce(total)
    return n * distributed.get_world_size() / float(total)


def largest(n: int, device: torch.device) -> int:
    """Returns the largest ``n`` of all ranks."""
    count = torch.tensor(n, dtype=torch.int64, device=device)
    distributed.all_reduce(count, distributed.ReduceOp.MAX)
    return int(count)


def episodes_of_all_ranks(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the evaluation episodes of all ranks, in their order; all ranks call it together."""
    names = ("return", "length", "success")
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, {name: batch[name].cpu() for name in names if name in batch})
    if any("success" in part for part in everyone):
        everyone = [{"success": torch.zeros_like(part["return"]), **part} for part in everyone]
    return {name: torch.cat([part[name] for part in everyone]).to(device) for name in names if name in everyone[0]}


def cpu_group() -> Any:
    """The group for objects that stay on the CPU, which NCCL's would move through GPUs; None: the default is gloo's."""
    global _gloo_group
    if distributed.get_backend() == "gloo" or not distributed.is_gloo_available():
        return None
    default: Any = distributed.group.WORLD
    of, found = _gloo_group[0](), _gloo_group[1]()
    if of is not default or found is None:
        found = distributed.new_group(backend="gloo")
        _gloo_group = (weakref.ref(default), weakref.ref(found))
    return found


def of_other_ranks(own: Any, trainer: Trainer | None) -> list[Any]:
    """Returns the parts of a checkpoint of the ranks after the first; an empty list for one process."""
    if trainer is None or is_alone(trainer):
        return []
    gathered: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(gathered, own, cpu_group())
    return gathered[1:]


def of_this_rank(first: Any, others: list[Any], trainer: Trainer | None) -> Any:
    """Returns this rank's part of a checkpoint."""
    rank = 0 if trainer is None else trainer.global_rank
    return others[rank - 1] if 0 < rank <= len(others) else first


def launches(trainer: Trainer) -> bool:
    """Returns whether this process starts the ranks of each ``fit``, which end with it."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def is_returning(trainer: Trainer | None) -> bool:
    """Returns whether this process is a rank that another process started, and its ``fit`` has ended."""
    return (
        trainer is not None
        and trainer.state.fn == TrainerFn.FITTING
        and trainer.state.finished
        and launches(trainer)
        and multiprocessing.parent_process() is not None
    )


# ---------------------------------------------------------------- a datamodule's part of a checkpoint


def gather_ranks(own: dict[str, Any], rank: int, world_size: int) -> list[Any]:
    """Every rank's state, on rank 0 (Lightning saves rank 0's alone); all ranks call it together."""
    if world_size == 1:
        return [own]
    states: list[Any] = [None] * world_size
    # Rank 0 writes the checkpoint; the other ranks do not need the states.
    distributed.gather_object(own, states if rank == 0 else None, dst=0, group=cpu_group())
    return states


def state_of_rank(states: list[Any], rank: int, world_size: int) -> dict[str, Any]:
    """This rank's state; a UsageError if the checkpoint has another number of ranks."""
    if len(states) != world_size:
        raise UsageError(
            f"the checkpoint was written by {len(states)} ranks, this run has {world_size}; resume with as many"
        )
    return states[rank]
