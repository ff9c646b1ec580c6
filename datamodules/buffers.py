"""The replay buffer."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.common.spaces import example_arrays
from rl_modules.core.state import Stateful, like

log = logging.getLogger(__name__)

Batch = dict[str, Any]


class ReplayBuffer(Stateful):
    """One ring of rows per environment, in which the row after a transition holds its successor.

    A row holds an observation and, if an action was taken in it, the rest of the transition. An episode's final
    observation takes a separate row without an action (``valid`` is false), and so does the newest observation. Hence
    the successor of row r is row r + 1 under every autoreset mode, and no observation is stored twice. Rows are
    numbered flat: ``row * n_envs + environment``.

    Args:
        observation_space: space of one observation; images stay uint8.
        action_space: space of one action.
        n_envs: number of environments.
        buffer_size: rows over all environments: transitions, and one for each episode's end.
        double: keep observations in float64 in spaces of float64, because they are normalised when they are drawn.
    """

    #: What is stored of each row beside its observation.
    stores: tuple[str, ...] = ("action", "reward", "terminated", "valid")
    #: Number of newest rows that a checkpoint holds; None: all.
    newest: int | None = None
    #: Rows of each environment at the beginning of a bounded checkpoint that lack a part of their observation.
    incomplete = 0

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        n_envs: int,
        buffer_size: int,
        double: bool = False,
    ) -> None:
        self.n_envs = n_envs
        self.rows = buffer_size // n_envs + 1  # the newest observation is no transition yet
        self.total = self.rows * n_envs

        def allocate(example: np.ndarray) -> Tensor:
            # NumPy's zeros take memory only when they are overwritten, torch's at once.
            return torch.from_numpy(np.zeros((self.total, *example.shape), example.dtype))

        example = example_arrays(observation_space, double)
        self.observation = tree_map(allocate, example)
        #: Of one observation, as :meth:`gather` returns it.
        self.observation_bytes = sum(leaf.nbytes for leaf in tree_leaves(example))
        self.action = allocate(example_arrays(action_space))
        self.reward = allocate(np.zeros((), np.float32))
        self.terminated, self.valid = (allocate(np.zeros((), bool)) for _ in range(2))
        self.head = torch.zeros(n_envs, dtype=torch.int64)
        self.filled = 0
        #: Called by :meth:`add` with the rollout and the returned row numbers.
        self.on_added: Callable[[Batch, Tensor, Tensor], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; memory is taken as they are filled."""
        stores = (getattr(self, name) for name in self.stores)
        return sum(leaf.nbytes for leaf in [*tree_leaves(self.observation), *stores])

    @property
    def rows_per_step(self) -> int:
        """Rows that a step may take at most: its transition, the end of its episode, and a stack's older frames."""
        return self.incomplete + 2

    def add(self, rollout: Batch) -> tuple[Tensor, Tensor]:
        """Appends a rollout, [T, N, …]; returns the rows that became transitions and those that ceased to be."""
        # NumPy, because it takes half of torch's time for the few rows of a round.
        valid = rollout["valid"].numpy()
        ended = valid & (rollout["terminated"] | rollout["truncated"]).numpy()
        starts = self._starts(rollout, valid, ended)
        older = self.incomplete * starts
        taken = valid.astype(np.int64) + ended + older
        written = taken.cumsum(0)
        environment, head = np.arange(self.n_envs), self.head.numpy()
        flat = (head + written - taken + older) % self.rows * self.n_envs + environment
        at = flat[valid]

        # Only the successors of these transitions are written; those of others are the next transition's observation.
        closing = ended.copy()
        closing[-1] |= valid[-1]
        successor = (flat[closing] + self.n_envs) % self.total

        apart = self._begin_stacks(rollout["observation"], flat, starts)
        _write(self.observation, at, self._newest(rollout["observation"]), valid)
        _write(self.observation, successor, self._newest(rollout["next_observation"]), closing)
        for name in ("action", "reward", "terminated"):
            _write(getattr(self, name), at, rollout[name], valid)
        head = head + written[-1]
        # The newest observation is no transition yet, and in the rows after it stacks have lost frames.
        lost = ((head + np.arange(self.incomplete + 1)[:, None]) % self.rows * self.n_envs + environment).reshape(-1)
        blocked = np.concatenate([*apart, successor, lost])
        in_use = self.valid.numpy()
        in_use[blocked] = False
        in_use[at] = True
        # Rows are filled from 0 on in every ring, so that the longest ring bounds where transitions can be.
        self.filled = self.rows if (head >= self.rows).any() else max(self.filled, int(head.max()) + 1)
        self.head = torch.from_numpy(head % self.rows)
        changes = torch.from_numpy(at), torch.from_numpy(blocked)
        if self.on_added is not None:
            self.on_added(rollout, *changes)
        return changes

    def _starts(self, rollout: Batch, valid: np.ndarray, ended: np.ndarray) -> Any:
        """Which observations begin a stack, whose older frames take rows in front of them, [T, N]; 0: none."""
        return 0

    def _begin_stacks(self, observation: Any, flat: np.ndarray, starts: Any) -> list[np.ndarray]:
        """Writes the older frames of stacks that begin; returns the rows that are no transitions for that."""
        return []

    def _newest(self, observation: Any) -> Any:
        """The part of observations that a row holds."""
        return observation

    def break_off(self, which: np.ndarray) -> None:
        """Ends running episodes of some environments, [N] bool; their newest observation stays the last successor."""
        environment = np.arange(self.n_envs)
        # An episode that has ended has its final observation in a separate row.
        newest = self.valid.numpy()[(self.head.numpy() - 1) % self.rows * self.n_envs + environment]
        moves = which & newest
        head = self.head.numpy() + moves
        self.filled = self.rows if (head >= self.rows).any() else max(self.filled, int(head.max()) + 1)
        head %= self.rows
        # The newest observation goes there next; in a full ring it holds the oldest transition.
        self.valid.numpy()[(head * self.n_envs + environment)[moves]] = False
        self.head = torch.from_numpy(head)

    def gather(self, index: Tensor, n_steps: int = 1) -> Batch:
        """Returns transitions over up to ``n_steps`` steps from the flat numbers of M valid rows, ``index``:
        observation and next_observation [M, *obs], action [M, *act], reward [M, n] float32 (0 after the end), n_steps
        [M] int64 (how many rewards count), terminated [M] bool (whether next_observation is terminal).

        A transition has fewer steps if its episode or the stored experience ends before; it then bootstraps from there.
        """
        if n_steps == 1:
            reward, steps, last = self.reward[index, None], torch.ones_like(index), index
        else:
            window = (index[:, None] + torch.arange(n_steps) * self.n_envs) % self.total
            # The row after an episode's end, or after the newest transition, is not valid.
            alive = self.valid[window].cumprod(1)
            reward, steps = torch.where(alive.bool(), self.reward[window], 0.0), alive.sum(1)
            last = (index + (steps - 1) * self.n_envs) % self.total
        successor = (last + self.n_envs) % self.total
        return {
            "observation": self.observations_at(index),
            "action": self.action[index],
            "reward": reward,
            "n_steps": steps,
            "terminated": self.terminated[last],
            "next_observation": self.observations_at(successor),
        }

    def observations_at(self, index: Tensor) -> Any:
        """Observations by their flat numbers, [M, *obs]."""
        return tree_map(lambda x: x[index], self.observation)

    def rows_to_save(self) -> Tensor:
        """Flat numbers of the rows that a checkpoint holds, at least one transition of each environment."""
        # One is the newest observation.
        kept = self.filled if self.newest is None else max(self.newest // self.n_envs, self.rows_per_step) + 1
        if kept >= self.filled:
            return torch.arange(self.filled * self.n_envs)
        row = (self.head + 1 - kept + torch.arange(kept)[:, None]) % self.rows
        return (row * self.n_envs + torch.arange(self.n_envs)).flatten()

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows that :meth:`rows_to_save` names; where these are all, they share the buffer's memory."""
        saved = self.rows_to_save()
        left_out = self.filled * self.n_envs - len(saved)

        def part(store: Tensor) -> Tensor:
            # A slice of torch's would be saved with the whole storage.
            return store[saved] if left_out else torch.from_numpy(store.numpy()[: len(saved)])

        state = {name: part(getattr(self, name)) for name in self.stores}
        if left_out:
            state["valid"][: self.incomplete * self.n_envs] = False
        head = torch.full_like(self.head, len(saved) // self.n_envs - 1) if left_out else self.head.clone()
        return {
            **super().state_dict(),
            **state,
            "observation": tree_map(part, self.observation),
            "head": head,
            "rows": self.rows,
            "left_out": left_out,
        }

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Restores the rows; ``state`` comes from a buffer of the same size."""
        super().load_state_dict(state)
        used = len(state["valid"])
        self.filled = used // self.n_envs

        def fill(store: Tensor, saved: Any, name: str) -> None:
            store[:used].copy_(like(saved, store[:used], name))

        tree_map(lambda store, x: fill(store, x, "observation"), self.observation, state["observation"])
        for name in self.stores:
            fill(getattr(self, name), state[name], name)
        self.head = like(state["head"], self.head, "head").clone()


def _write(store: Any, rows: np.ndarray, source: Any, chosen: np.ndarray) -> None:
    """Writes ``source[chosen]`` into ``rows`` of the store; tensors, or nested dictionaries of such."""
    tree_map(lambda x, y: x.numpy().__setitem__(rows, y.numpy()[chosen]), store, source)


def announce_memory(buffer: ReplayBuffer, buffer_size: int, other_bytes: int, local_ranks: int) -> None:
    """Reports how much memory the buffers of a machine's ranks will take as they are filled.

    Args:
        buffer: that of this rank.
        buffer_size: its number of rows as the user gave it.
        other_bytes: what each rank takes beside its buffer.
        local_ranks: ranks of this machine.

    Raises:
        UsageError: more than there is.
    """
    bound = buffer.newest
    needed, free = local_ranks * (buffer.nbytes + other_bytes), available_bytes()
    if is_bounded := bound is not None and bound < buffer_size:
        # The copy of its newest rows, while a checkpoint is written.
        needed += local_ranks * buffer.nbytes * bound // buffer_size
    needs, has = _readable(needed), _readable(free)
    if needed > free:
        raise UsageError(
            f"buffer_size={buffer_size} needs {needs} of memory, but {has} are free; "
            f"{int(buffer_size * free / needed * 0.8)} would fit"
        )
    rank_zero_only(log.info)(f"The replay buffer takes up to {needs} of memory; {has} are free.")
    if is_bounded:
        rank_zero_only(log.info)(
            f"Checkpoints hold the newest {bound:,} of its {buffer_size:,} rows: a run resumed from one "
            "lacks the older transitions, and differs from one that was never stopped."
        )


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def available_bytes() -> int:
    """Memory that this process may still take, in bytes: what the machine has free, or the container's limit leaves."""
    known = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        known.append(int(fields["MemAvailable"].split()[0]) * 1024)
    elif hasattr(os, "sysconf"):
        # Only Linux reports the free memory; elsewhere the installed memory is an upper bound.
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        group = Path(folder)
        if (group / limit).is_file() and (text := (group / limit).read_text().strip()) != "max":
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, but the system frees them when needed.
            known.append(int(text) - int((group / used).read_text()) + int(statistics[cached]))
    return min(known, default=2**63)
