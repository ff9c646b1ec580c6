"""Sums over ranks by messages from rank to rank."""

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from rl_modules import exchange
from tests.ranks import on_ranks


def _numbers(rank):
    return torch.randn(501, generator=torch.Generator().manual_seed(rank))


def _join():
    import os

    distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def _sums():
    _join()
    x = _numbers(distributed.get_rank())
    exchange.add_over_ranks(x)
    large = torch.full((exchange.MOST_BYTES // 4 + 1,), float(distributed.get_rank() + 1))
    exchange.add_over_ranks(large)
    return {"x": x, "large": large[[0, -1]]}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_those_of_all_ranks_and_the_same_bits_on_each(tmp_path, world_size):
    results = on_ranks(_sums, tmp_path, world_size)
    expected = torch.stack([_numbers(rank).double() for rank in range(world_size)]).sum(0)
    for result in results:
        torch.testing.assert_close(result["x"].double(), expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(result["x"], results[0]["x"])
        assert result["large"].tolist() == [world_size * (world_size + 1) / 2] * 2


def _gradients():
    _join()
    torch.manual_seed(0)
    # The second layer is larger than what is exchanged directly.
    model = nn.Sequential(nn.Linear(3, 700), nn.Linear(700, 700), nn.Linear(700, 1))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.5)
    exchange.exchange_gradients(wrapped)
    for _ in range(2):  # DDP makes its buckets anew behind the first
        model.zero_grad()
        wrapped(_numbers(distributed.get_rank())[:300].view(100, 3)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradients_of_ddp_are_means_over_ranks(tmp_path):
    results = on_ranks(_gradients, tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 700), nn.Linear(700, 700), nn.Linear(700, 1))
    batch = torch.cat([_numbers(rank)[:300].view(100, 3) for rank in range(2)])
    model(batch).square().mean().backward()
    for result in results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result[name], parameter.grad, atol=1e-6, rtol=1e-4)
