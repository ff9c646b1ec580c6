"""On-policy experience: rollouts of the current policy, in minibatches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from datamodules.base import Batch, ControlDataModule
from datamodules.envs.vector import AUTORESET
from datamodules.loader import LazyLoader
from rl_modules.common.errors import UsageError
from rl_modules.common.modes import evaluation_mode
from rl_modules.common.seeding import stream_seed
from rl_modules.common.spaces import tree_leaves, tree_map


class RolloutDataModule(ControlDataModule):
    """Rollouts of the current policy.

    Every epoch collects ``rollouts_per_epoch`` rollouts of ``n_steps`` transitions from each of ``n_envs``
    environments, lets the module ``prepare`` each, and yields it ``n_epochs`` times in shuffled minibatches. The names
    are Stable-Baselines3's.

    Args:
        env_id: a Gymnasium id, ``package.module:callable``, or a callable that returns an environment.
        n_envs: environments that step together, per rank.
        n_steps: transitions per environment and rollout.
        batch_size: transitions per minibatch; must divide ``n_envs * n_steps``. None: the whole rollout.
        n_epochs: passes over each rollout.
        rollouts_per_epoch: rollouts per Lightning epoch; raise it where rollouts are tiny.
        **environment: ``total_timesteps``, ``seed``, ``norm_obs``, ``eval_freq`` and the other arguments of
            :class:`~datamodules.base.ControlDataModule`.

    Raises:
        UsageError: an argument that can't be used, in one sentence.
    """

    def __init__(
        self,
        env_id: Any = "CartPole-v1",
        n_envs: int = 8,
        n_steps: int = 256,
        batch_size: int | None = 64,
        n_epochs: int = 10,
        rollouts_per_epoch: int = 1,
        **environment: Any,
    ) -> None:
        super().__init__(env_id, n_envs, **environment)
        self.n_steps = n_steps
        self.batch_size = n_envs * n_steps if batch_size is None else batch_size
        self.n_epochs = n_epochs
        self.rollouts_per_epoch = rollouts_per_epoch
        self.require_at_least_one("n_steps", "n_epochs", "rollouts_per_epoch")
        size = n_envs * n_steps
        if not 1 <= self.batch_size <= size:
            raise UsageError(f"batch_size={batch_size} must lie between 1 and n_envs*n_steps={size}; {size} would take "
                             "the rollout whole")  # fmt: skip
        if size % self.batch_size:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.batch_size))
            raise UsageError(f"batch_size={batch_size} does not divide n_envs*n_steps={size}; {nearest} is the nearest "
                             "that does")  # fmt: skip
        self._position = 0
        self._fields: Batch | None = None
        self._order: Tensor | None = None
        self._shuffler = torch.Generator()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._shuffler.manual_seed(stream_seed(self.seed, self._rank, "minibatches"))
            self._position = 0
            self._fields = self._order = None

    @property
    def transitions_per_epoch(self) -> int:
        """Transitions that one epoch adds, over all ranks."""
        return self.n_envs * self.n_steps * self.rollouts_per_epoch * self._world_size

    # ---------------------------------------------------------------- training batches

    def train_dataloader(self) -> LazyLoader:
        return LazyLoader(self.rollouts_per_epoch * self._batches_per_rollout, self._minibatches)

    @property
    def rollout(self) -> Batch | None:
        """The prepared rollout that is being handed out, flat over its valid rows; None before the first."""
        return self._fields

    @property
    def rollout_is_used_up(self) -> bool:
        """True from the last minibatch of a rollout on, until the next rollout is collected."""
        return self._position % self._batches_per_rollout == 0

    @property
    def is_complete(self) -> bool:
        """Whether ``total_timesteps`` are reached and everything of them is learned from."""
        return self.num_timesteps >= self.total_timesteps and self.rollout_is_used_up

    @property
    def _batches_per_rollout(self) -> int:
        return self.n_epochs * (self.n_envs * self.n_steps // self.batch_size)

    def _minibatches(self) -> Iterator[Batch]:
        """One epoch's minibatches, from where the checkpoint left off."""
        per_pass = self.n_envs * self.n_steps // self.batch_size
        per_rollout = self._batches_per_rollout
        length = self.rollouts_per_epoch * per_rollout
        if self._position >= length:
            self._position = 0
        batches: list[Batch] = []
        for position in range(self._position, length):
            if position % per_rollout == 0:
                self._fields = self._new_rollout()
            if position % per_pass == 0:
                self._order = self._draw_order()
            if position % per_pass == 0 or not batches:
                batches = self._split(per_pass)
            self._position = position + 1
            # Lightning asks for nothing after the last batch, so that the end is announced before it.
            if (position + 1) % per_rollout == 0 and self.num_timesteps >= self.total_timesteps:
                assert self.trainer is not None
                self.trainer.should_stop = True
                # This is where the epoch ends, should the run go on with a larger total_timesteps.
                self._position = length
            yield batches[position % per_pass]

    def _new_rollout(self) -> Batch:
        """Collect, let the module prepare, and flatten [T, N] to the valid rows."""
        assert self.trainer is not None and self.collector is not None
        module: Any = self.trainer.lightning_module
        with evaluation_mode(module), torch.no_grad():
            with self.trainer.precision_plugin.forward_context():
                rollout = self.collector.collect(module.act, self.n_steps, module.device)
            valid = rollout["valid"]
            self.num_timesteps += self._count_valid(valid)
            prepared = module.prepare(rollout)
        # Rows need not be the rollout's own: Monte Carlo control hands on the episodes that have ended.
        valid = prepared.pop("valid", valid)
        if self.collector.envs.metadata["autoreset_mode"] != AUTORESET["next_step"]:
            return tree_map(lambda x: x.flatten(0, 1), prepared)
        return tree_map(lambda x: x[valid], prepared)

    def _draw_order(self) -> Tensor | None:
        # One minibatch per pass sees the same transitions in any order.
        if self.batch_size == self.n_envs * self.n_steps:
            return None
        assert self._fields is not None
        return torch.randperm(len(tree_leaves(self._fields)[0]), generator=self._shuffler)

    def _split(self, n_minibatches: int) -> list[Batch]:
        """The rollout in its current order, cut into minibatches (of nearly one size where rows are not valid)."""
        fields, order = self._fields, self._order
        assert fields is not None
        if order is None:
            return [fields]
        shuffled = tree_map(lambda x: x[order.to(x.device)], fields)
        return [tree_map(lambda x, i=i: x.tensor_split(n_minibatches)[i], shuffled) for i in range(n_minibatches)]

    # ---------------------------------------------------------------- state

    @property
    def _layout(self) -> dict[str, int]:
        names = ("n_envs", "n_steps", "batch_size", "n_epochs", "rollouts_per_epoch")
        return {**{name: getattr(self, name) for name in names},
                "length": self.rollouts_per_epoch * self._batches_per_rollout}  # fmt: skip

    def rank_state(self) -> dict[str, Any]:
        """The collector, and the rollout where it is half used."""
        mid_rollout = self._position % self._batches_per_rollout != 0
        return {
            **super().rank_state(),
            "position": self._position,
            "layout": self._layout,
            "shuffler": self._shuffler.get_state(),
            "fields": tree_map(lambda x: x.cpu(), self._fields) if mid_rollout else None,
            "order": self._order if mid_rollout else None,
        }

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`rank_state`."""
        super().load_rank_state(state)
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        self._position = self.resumed_position(state, self._layout)
        self._shuffler.set_state(state["shuffler"].cpu())
        self._fields = None if state["fields"] is None else tree_map(lambda x: x.to(device), state["fields"])
        self._order = state["order"]
