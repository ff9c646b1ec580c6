"""Sums over ranks of small tensors on CPUs.

gloo's collectives take half a millisecond and more, whatever the size; an update of a small network takes one. Two
messages between two ranks take a tenth of a millisecond, so that small tensors go from rank to rank directly, by
recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.1): of 2^k ranks all have the sum after k exchanges.
"""

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

#: Larger tensors are bound by bandwidth, of which gloo's ring makes better use.
MOST_BYTES = 2**20


def add_over_ranks(x: Tensor) -> None:
    """Replace a tensor by its sum over all ranks, which is the same on them bit for bit.

    Args:
        x: contiguous, of the same shape on every rank.
    """
    if not _goes_directly(x):
        distributed.all_reduce(x)
        return
    rank, theirs, distance = distributed.get_rank(), torch.empty_like(x), 1
    while distance < distributed.get_world_size():
        sending = distributed.isend(x, rank ^ distance)
        distributed.recv(theirs, rank ^ distance)
        if sending is not None:
            sending.wait()
        x += theirs
        distance *= 2


def exchange_gradients(model: nn.Module | None) -> None:
    """Have DDP average small gradients by :func:`add_over_ranks`.

    Args:
        model: as the strategy has wrapped it; anything but DDP over gloo, on CPUs, is left as it is: elsewhere a
            strategy's own ``ddp_comm_hook`` may be there, and DDP takes one.
    """
    if not isinstance(model, DistributedDataParallel) or distributed.get_backend() != "gloo":
        return
    if next(model.parameters()).device.type == "cpu":
        model.register_comm_hook(None, _average)


def _goes_directly(x: Tensor) -> bool:
    size = distributed.get_world_size()
    return x.device.type == "cpu" and x.nbytes <= MOST_BYTES and not size & (size - 1)


def _average(_: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer().div_(distributed.get_world_size())
    if not _goes_directly(gradients):
        work = distributed.all_reduce(gradients, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    add_over_ranks(gradients)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
