"""Demonstrations that a policy learns from besides experience, so that it does not forget them (PPO-ptx)."""

from typing import Any

import torch
from torch import Tensor

from datamodules.language.sequences import Sequences
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed


class Demonstrations:
    """An endless shuffled stream of prompts with completions, in equal parts for every optimizer step.

    The demonstrations of a step depend only on the seed, the step and the rank, so there is no state to store.

    Args:
        prompts: n lists of token ids.
        completions: n lists of token ids, EOS included.
        per_step: sequences per optimizer step and rank.
        seed: of the order.
        longest: tokens that the model can take.

    Raises:
        UsageError: a demonstration that is too long for the model.
    """

    def __init__(
        self, prompts: list[list[int]], completions: list[list[int]], per_step: int, seed: int, longest: int
    ) -> None:
        self.sequences = Sequences(prompts, completions, completion_only=True)
        most = int(self.sequences.total.max())
        if most > longest:
            where = int(self.sequences.total.argmax())
            raise UsageError(f"demonstration {where} has {most} tokens, the model takes {longest}; shorten it")
        self.per_step = per_step
        self.seed = seed

    def parts(self, step: int, rank: int, ranks: int, n_micro: int, pad_id: int, device: Any) -> list[dict[str, Any]]:
        """One step's demonstrations of one rank, divided over its micro-batches.

        Args:
            step: number of the optimizer step.
            rank: of this process.
            ranks: number of processes.
            n_micro: micro-batches of the step.
            pad_id: what fills the rows up.
            device: where the tensors go.

        Returns:
            Per micro-batch ``ptx_tokens`` [b, T], ``ptx_counted`` (places in the flattened tokens that count), and
            ``ptx_step_tokens``, how many count in the whole step, averaged over ranks.
        """
        size = self.per_step * ranks
        index = self._stretch(step * size, size)
        step_tokens = int(self.sequences.counted[index].sum()) / ranks
        own = index[rank * self.per_step : (rank + 1) * self.per_step]
        own = own[self.sequences.total[own].argsort(stable=True)]
        batches = [self.sequences.batch(part, pad_id) for part in own.tensor_split(n_micro)]
        return [
            {f"ptx_{name}": value.to(device) for name, value in batch.items()} | {"ptx_step_tokens": step_tokens}
            for batch in batches
        ]

    def _stretch(self, first: int, count: int) -> Tensor:
        """Returns the demonstrations at ``count`` places of the stream; each pass over them has its own order."""
        n = len(self.sequences)
        passes = range(first // n, (first + count - 1) // n + 1)
        orders = [
            torch.randperm(n, generator=torch.Generator().manual_seed(stream_seed(self.seed, 0, "demonstrations", i)))
            for i in passes
        ]
        return torch.cat(orders)[first % n : first % n + count]
