"""Uniform and prioritised sampling from a replay buffer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.buffers import ReplayBuffer
from rl_modules.core.state import Stateful, persistent


class UniformSampler(Stateful):
    """Every transition equally likely, with replacement."""

    generator: torch.Generator = persistent(lambda self: torch.Generator().manual_seed(self.seed))

    def __init__(self, buffer: ReplayBuffer, seed: int) -> None:
        self.buffer, self.seed = buffer, seed

    def draw(self, n: int) -> Tensor:
        """Flat numbers of ``n`` valid rows; at least one must be valid."""
        used = self.buffer.filled * self.buffer.n_envs
        index = torch.randint(used, (n,), generator=self.generator)
        # The few rows that are not transitions are drawn again.
        while not (valid := self.buffer.valid.numpy()[index.numpy()]).all():
            missed = np.flatnonzero(~valid)
            index[missed] = torch.randint(used, (len(missed),), generator=self.generator)
        return index


class SumTree:
    """Numbers, all 0 at first, whose prefix sums can be searched in logarithmic time."""

    def __init__(self, size: int) -> None:
        self.leaves = 1 << max(size - 1, 1).bit_length()
        self.nodes = np.zeros(2 * self.leaves)

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(self.nodes[1])

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self.nodes[self.leaves + index]

    def __setitem__(self, index: np.ndarray, value: np.ndarray | float) -> None:
        node = self.leaves + index
        self.nodes[node] = value
        while len(node) and node[0] > 1:
            node = np.unique(node // 2)
            # Summed from the children each time, so that rounding errors do not accumulate.
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, prefix: np.ndarray) -> np.ndarray:
        """For each number u in [0, total), the index i with sum(:i) <= u < sum(:i+1); never one whose value is 0."""
        node = np.ones(len(prefix), np.int64)
        while node[0] < self.leaves:
            left = 2 * node
            goes_right = (prefix >= self.nodes[left]) & (self.nodes[left + 1] > 0)
            prefix = prefix - self.nodes[left] * goes_right
            node = left + goes_right
        return node - self.leaves


class PrioritizedSampler(Stateful):
    """Transitions in proportion to the size of their last TD error.

    P(i) = p_i^α / Σ_k p_k^α,   p_i = |δ_i| + ε;   a new transition has the largest priority seen so far.

    A minibatch of k draws one transition from each of k equal parts of the total, which keeps P and spreads the draws.

    Source: Schaul et al. 2016, arXiv:1511.05952, eq. 1 and algorithm 1.
    """

    generator: torch.Generator = persistent(lambda self: torch.Generator().manual_seed(self.seed))
    #: Largest priority so far.
    largest: float = persistent(1.0)

    def __init__(self, buffer: ReplayBuffer, seed: int, alpha: float = 0.6, epsilon: float = 1e-6) -> None:
        self.buffer, self.seed, self.alpha, self.epsilon = buffer, seed, alpha, epsilon
        self.tree = SumTree(buffer.total)

    def added(self, transitions: Tensor, blocked: Tensor) -> None:
        """Sets the priorities of the rows that :meth:`ReplayBuffer.add` returned."""
        self.tree[blocked.numpy()] = 0.0
        self.tree[transitions.numpy()] = self.largest**self.alpha

    def draw(self, n: int) -> Tensor:
        """Flat numbers of ``n`` valid rows."""
        uniform = torch.rand(n, generator=self.generator, dtype=torch.float64).numpy()
        return torch.from_numpy(self.tree.find((np.arange(n) + uniform) * (self.tree.total / n)))

    def weights(self, index: Tensor, beta: float, largest_of_ranks: Callable[[float], float] | None = None) -> Tensor:
        """Importance weights (N P(i))^-β of a minibatch over the largest, also over the ranks, [M] float32."""
        weight = self.tree[index.numpy()] ** -beta
        if largest_of_ranks is None:
            largest = weight.max()
        else:
            # Each rank draws from a buffer of its own, whose sum of priorities no longer cancels.
            weight = weight * self.tree.total**beta
            largest = largest_of_ranks(float(weight.max()))
        return torch.from_numpy((weight / largest).astype(np.float32))

    def update(self, index: Tensor, td_error: Tensor) -> None:
        """Sets the priorities of a minibatch from its absolute TD errors, [M] each."""
        priority = td_error.abs().double().cpu().numpy() + self.epsilon
        self.largest = max(self.largest, float(priority.max()))
        self.tree[index.numpy()] = priority**self.alpha

    def state_dict(self) -> dict[str, Any]:
        """Adds the priorities of the rows that a checkpoint holds."""
        return {**super().state_dict(), "powers": torch.from_numpy(self.tree[self.buffer.rows_to_save().numpy()])}

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        super().load_state_dict(state)
        # Rows that were added before, as by a subclass that fills the buffer, may lie beyond those of the checkpoint.
        self.tree = SumTree(self.buffer.total)
        # A bounded checkpoint may hold rows that are transitions no longer.
        valid = self.buffer.valid[: len(state["powers"])].numpy()
        self.tree[np.arange(len(state["powers"]))] = state["powers"].numpy() * valid
