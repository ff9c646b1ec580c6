"""One seed, many streams: no two ranks, environments or purposes share randomness."""

import zlib

import numpy as np
import torch


def stream_seed(seed: int, rank: int, purpose: str, index: int = 0) -> int:
    """Returns a 32-bit seed that depends on all four arguments, and on nothing else.

    Args:
        seed: the run's seed.
        rank: global rank of the process.
        purpose: what the stream is for, such as ``"train"`` or ``"eval"``.
        index: number within the purpose, such as an environment's.
    """
    return int(np.random.SeedSequence([seed, rank, zlib.crc32(purpose.encode()), index]).generate_state(1)[0])


def generator_of(seed: int, rank: int, purpose: str) -> torch.Generator:
    """Returns a generator on the CPU with that seed."""
    return torch.Generator().manual_seed(stream_seed(seed, rank, purpose))
