"""The convolutional encoder's fast way beside its plain layers, forward and backward, alternating.

python -m benchmarks.encoder
"""

import os
import time
from unittest import mock

import numpy as np
import torch
from gymnasium import spaces

from rl_modules.networks import encoders


def main(rounds: int = 8) -> None:
    """Prints milliseconds per minibatch, the fastest of the rounds, and their ratio."""
    torch.set_num_threads(1)
    network = encoders.NatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8))
    for n in (32, 256):
        frames = torch.randint(0, 255, (n, 4, 84, 84), dtype=torch.uint8)
        took: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for is_fast, times in took.items():
                with mock.patch.dict(os.environ, RL_FAST=str(int(is_fast))):
                    start_s = time.perf_counter()
                    network(frames).sum().backward()
                    times.append(time.perf_counter() - start_s)
        fast_ms, plain_ms = (1e3 * min(took[is_fast]) for is_fast in (True, False))
        print(f"{n} stacks of 84x84: {fast_ms:.1f} ms, plain {plain_ms:.1f} ms, {plain_ms / fast_ms:.2f} times")


if __name__ == "__main__":
    main()
