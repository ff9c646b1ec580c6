"""The order of training records."""

import torch

from rl_modules.common.seeding import stream_seed


class EndlessOrder:
    """Endless passes over records, each in a different order, which is the same on every rank.

    A pass's order depends only on the seed and the pass, so the state of a run is one number.

    Args:
        seed: of the orders.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._passes: dict[int, torch.Tensor] = {}

    def at(self, position: int, n: int) -> int:
        """Which of ``n`` records stands at a position of the endless stream."""
        number, offset = divmod(position, n)
        order = self._passes.get(number)
        if order is None or len(order) != n:
            generator = torch.Generator().manual_seed(stream_seed(self._seed, 0, "order", number))
            order = torch.randperm(n, generator=generator)
            # Two passes may be in use at once, if a batch crosses the end of one. Rounds that are written ahead call
            # this in another thread, so the dictionary is replaced and never changed.
            self._passes = {k: v for k, v in self._passes.items() if k == number - 1} | {number: order}
        return int(order[offset])
