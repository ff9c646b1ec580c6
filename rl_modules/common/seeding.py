"""One seed, many streams: no two ranks, environments or purposes share randomness."""

import threading
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Generator

#: Held by what seeds torch's global generators and draws from them: all threads of a process share these. Reentrant,
#: because a distribution's `sample` may call another's.
GLOBAL_GENERATORS = threading.RLock()


def stream_seed(seed: int, rank: int, purpose: str, index: int = 0) -> int:
    """Returns a 32-bit seed that depends on all four arguments, and on nothing else."""
    return int(np.random.SeedSequence([seed, rank, zlib.crc32(purpose.encode()), index]).generate_state(1)[0])


def generator_of(seed: int, rank: int, purpose: str) -> "Generator":
    """Returns a generator on the CPU with that seed."""
    from torch import Generator  # tasks need no torch

    return Generator().manual_seed(stream_seed(seed, rank, purpose))
