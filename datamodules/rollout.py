"""On-policy experience: rollouts of the current policy, in minibatches."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from datamodules.base import Batch, ControlDataModule
from datamodules.collector import prepared_by, rollout_act
from datamodules.evaluation import count_evaluations
from datamodules.experience import LazyLoader
from datamodules.memory import Memory
from datamodules.overlap import CollectedAhead
from datamodules.recorded_iteration import RecordedIteration
from rl_modules.checkpoints import preparation, resumed_position
from rl_modules.common.errors import UsageError, at_least
from rl_modules.common.modules import evaluation_mode, tree_leaves, tree_map
from rl_modules.common.notices import notice
from rl_modules.common.seeding import generator_of
from rl_modules.contract import MINIBATCHES, Rollout, RolloutSource
from rl_modules.core.settings import Converted, setting
from rl_modules.core.state import persistent, transient

#: Estimated times of an environment step and of an update, in ms, and the shortest time of an epoch, chosen so that
#: Lightning's two or three ms per epoch are a few per cent of it.
STEP_MS, UPDATE_MS, EPOCH_MS = 0.2, 1.0, 100.0


def check_batch_size(name: str, value: Any) -> Any:
    """Refuses what is neither a number, nor None, nor ``auto``."""
    if isinstance(value, str) and value != "auto":
        raise UsageError(f"{name}={value!r} must be a number, null for the whole rollout, or auto")
    return value


class RolloutDataModule(ControlDataModule):
    """Rollouts of the current policy.

    Every epoch collects ``rollouts_per_epoch`` rollouts of ``n_steps`` transitions from each of ``n_envs``
    environments, calls the module's ``prepare`` on each, and yields it ``n_epochs`` times in shuffled minibatches.
    Names are Stable-Baselines3's; the algorithm sets the defaults.
    """

    filled_in = ("n_steps", "n_epochs", "batch_size", "rollouts_per_epoch")
    n_steps: Converted[int | None, int] = setting(
        default=None,
        says="transitions per environment and rollout; None: the algorithm's (256; PQN 128, A2C and RecurrentA2C 5, "
        "tables 1)",
        least=1,
    )
    batch_size: Converted[int | Literal["auto"] | None, int] = setting(
        default="auto",
        says="transitions per minibatch; where it does not divide ``n_envs * n_steps``, each pass's last minibatch "
        "has the rest. None: the whole rollout; ``auto``: the algorithm's (PPO and RecurrentPPO 64, PQN 128, or the "
        "nearest divisor of the rollout; others: the whole rollout)",
        check=check_batch_size,
        idle=lambda data: data.n_minibatches is not None and "beside n_minibatches; leave that out",
    )
    n_minibatches: int | None = setting(
        default=None,
        says="minibatches per pass, of nearly one size, instead of ``batch_size``; None: by ``batch_size``",
        least=1,
    )
    n_epochs: Converted[int | None, int] = setting(
        default=None,
        says="passes over each rollout; None: the algorithm's (PPO and RecurrentPPO 10, PQN 4, others 1)",
        least=1,
    )
    rollouts_per_epoch: Converted[int | None, int] = setting(
        default=None,
        says="rollouts per Lightning epoch; None: enough to keep Lightning's cost per epoch small, 1 for long rollouts",
        least=1,
    )
    overlap: bool = setting(
        default=False,
        says="collect the next rollout in a thread while the last one trains, with the weights from before this "
        "training, which PPO's ratio corrects. It pays where environments are slow and step outside of this process "
        "(``vectorization_mode: async`` or an engine), and a core is free",
    )

    # In this epoch, in minibatches.
    _position: int = persistent(0)
    _fields: Batch | None = persistent()
    _order: Tensor | None = persistent()
    _shuffler: torch.Generator = persistent(lambda self: generator_of(self.seed, self._rank, "minibatches"))
    # The next rollout, if the thread of `overlap` has collected it, and what runs the thread.
    _next: Rollout | None = persistent()
    _ahead: Any = transient()
    # The step of training under the algorithm's `graph`.
    _recorded: Any = transient()
    #: Rows of the present minibatch over the mean of those whose gradients one optimizer step accumulates.
    minibatch_weight: float = transient(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve()

    def begin_run(self) -> None:
        super().begin_run()
        if self.has_learner and hasattr(self.learner, "initial_state"):
            self.collector.memory = Memory(self.learner)
        self.resolve()
        self._say_how_it_is_cut()
        self.collector.reports_at_once = not self.overlap
        if not self.overlap:
            return
        if self.learner_trainer.precision == "64-true":
            raise UsageError(
                "overlap=True: trainer.precision=64-true changes a setting of the whole process during "
                "forward passes, which a thread can't share; leave overlap out"
            )

        collector, device = self.collector, self.learner_trainer.strategy.root_device
        self._ahead = CollectedAhead(lambda act: collector.collect(act, self.n_steps, device))

    def _teardown(self, stage: str) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        super()._teardown(stage)

    def _resolve(self) -> None:
        """Fills in settings that were not given with the algorithm's defaults, and checks them against each other."""
        wanted = self.learner.experience if self.has_learner else MINIBATCHES
        given = self.hparams
        self.n_steps = wanted.n_steps if given["n_steps"] is None else int(given["n_steps"])
        self.n_epochs = wanted.n_epochs if given["n_epochs"] is None else int(given["n_epochs"])
        size = self.n_envs * self.n_steps
        if given["batch_size"] == "auto":
            self.batch_size = size if wanted.batch_size is None else _nearest_divisor(size, wanted.batch_size)
        else:
            self.batch_size = size if given["batch_size"] is None else int(given["batch_size"])
        if self.n_minibatches is not None:
            self.batch_size = max(1, size // self.n_minibatches)
        self._check_batch_size(self.batch_size, size)
        resets = self._collector is not None and self._collector.mode == AutoresetMode.NEXT_STEP
        if resets and self.batch_size == 1 < size:
            raise UsageError(
                f"batch_size=1 makes a minibatch of each of n_envs*n_steps={size} rows, and with "
                "autoreset_mode=next_step some rows are resets, not transitions; give at least "
                "batch_size=2"
            )
        if wanted.whole_rollouts and (self.n_epochs != 1 or self.batch_size != size):
            raise UsageError(
                f"{type(self.learner).__name__} learns once from each whole rollout; the datamodule has "
                f"n_epochs={self.n_epochs} and batch_size={self.batch_size}: leave both out, or give "
                f"n_epochs=1 and batch_size=None (that is {size} transitions)"
            )
        if wanted.whole_rollouts and self.overlap:
            raise UsageError(
                f"overlap=True collects with the policy from before the last update, and "
                f"{type(self.learner).__name__}'s update holds for the current policy only; leave overlap "
                "out"
            )
        if given["rollouts_per_epoch"] is None:
            self.rollouts_per_epoch = self._rollouts_that_pay_for_an_epoch()
        else:
            self.rollouts_per_epoch = int(given["rollouts_per_epoch"])

    def _rollouts_that_pay_for_an_epoch(self) -> int:
        wanted = math.ceil(EPOCH_MS / (self.n_steps * STEP_MS + self._batches_per_rollout * UPDATE_MS))
        # Curves need enough points, one per epoch, and evaluations run between epochs.
        most = min(self.total_timesteps // 25, self.eval_freq or self.total_timesteps)
        return max(1, min(wanted, most // (self.n_envs * self.n_steps * self._world_size)))

    def _check_batch_size(self, batch_size: int, size: int) -> None:
        if self.environments.may_be_vector or (self.trainer is None and self.hparams["n_steps"] is None):
            at_least("batch_size", batch_size)
            return  # `setup` makes the vector and knows the algorithm, and checks
        if not 1 <= batch_size <= size:
            raise UsageError(
                f"batch_size={batch_size} must lie between 1 and n_envs*n_steps={size}; {size} would take "
                "the rollout whole"
            )
        if self.n_minibatches is not None and self.n_minibatches > size:
            raise UsageError(f"n_minibatches={self.n_minibatches} is more than n_envs*n_steps={size} transitions")

    def _say_how_it_is_cut(self) -> None:
        """Says that minibatches have different sizes, as Stable-Baselines3 does."""
        size = self.n_envs * self.n_steps
        if self.n_minibatches is None and (rest := size % self.batch_size):
            last = f"the last of {rest} transitions"
            what = "of whole sequences and nearly one size" if self.collector.memory else last
            notice(
                f"batch_size={self.batch_size} does not divide n_envs*n_steps={size}: each pass has "
                f"{self.batches_per_pass} minibatches, {what}."
            )

    @property
    def transitions_per_epoch(self) -> int:
        """Transitions that one epoch adds, over all ranks."""
        return self.n_envs * self.n_steps * self.rollouts_per_epoch * self._world_size

    # ---------------------------------------------------------------- training batches

    def train_dataloader(self) -> LazyLoader:
        self._check_batch_size(self.batch_size, self.n_envs * self.n_steps)  # a callback may have set it
        self.begin_statistics()
        if self._is_recorded:
            return LazyLoader(self.rollouts_per_epoch, lambda: self._recorded.iterations())
        return LazyLoader(self._layout["length"], self._minibatches)

    @property
    def _is_recorded(self) -> bool:
        return self.has_learner and getattr(self.learner, "graph", False)

    def recorded_iteration(self) -> Any:
        """Returns a rollout and the updates on it as one step of training, for an algorithm with ``graph``."""
        self._recorded = RecordedIteration(self)
        return self._recorded

    def metrics(self) -> dict[str, float]:
        if self._recorded is not None:
            self._recorded.read_episodes()
        return super().metrics()

    @property
    def rollout(self) -> Batch:
        """The prepared rollout whose minibatches are being yielded, flattened over its valid rows."""
        if self._fields is None:
            raise RuntimeError("no rollout has been collected yet")
        return self._fields

    @property
    def rollout_is_used_up(self) -> bool:
        """True after the last minibatch of a rollout, until the next rollout is collected."""
        return self._position % self._batches_per_rollout == 0

    @property
    def is_complete(self) -> bool:
        """Whether ``total_timesteps`` transitions were collected and all of them were learned from."""
        return self.num_timesteps >= self.total_timesteps and self.rollout_is_used_up

    @property
    def batches_per_pass(self) -> int:
        """Minibatches of one pass over a rollout."""
        return self.n_minibatches or math.ceil(self.n_envs * self.n_steps / self.batch_size)

    def sizes(self, rows: int) -> list[int]:
        """Returns the sizes of a pass's minibatches of ``rows``: of ``batch_size`` and a rest, or nearly equal ones
        where rows are sequences, resets are left out, or their number is given.
        """
        n = self.batches_per_pass
        if self.n_minibatches is None and rows == self.n_envs * self.n_steps:
            return [min(self.batch_size, rows - i * self.batch_size) for i in range(n)]
        return [rows // n + (i < rows % n) for i in range(n)]

    @property
    def _batches_per_rollout(self) -> int:
        """Minibatches of all passes over a rollout."""
        return self.n_epochs * self.batches_per_pass

    def _weight(self, batches: list[Batch], position: int) -> float:
        """:attr:`minibatch_weight` of the minibatch at a position in the epoch, whose pass these are."""
        trainer = self.learner_trainer
        accumulated = trainer.accumulate_grad_batches
        if accumulated == 1:
            return 1.0
        sizes = [len(tree_leaves(batch)[0]) for batch in batches]
        first = position - (trainer.fit_loop.batch_idx + 1) % accumulated
        last = min(first + accumulated, self.rollouts_per_epoch * self._batches_per_rollout)
        step = [sizes[i % len(sizes)] for i in range(first, last)]
        return sizes[position % len(sizes)] * len(step) / sum(step)

    def _minibatches(self) -> Iterator[Batch]:
        """One epoch's minibatches, from where the checkpoint left off, or ``limit_train_batches`` the last epoch."""
        per_pass, per_rollout = self.batches_per_pass, self._batches_per_rollout
        length = self.rollouts_per_epoch * per_rollout
        batches: list[Batch] = []
        position = self._position
        # Lightning knows how many of them an epoch has.
        for _ in range(length):
            position = 0 if position >= length else position
            if position % per_rollout == 0:
                self._fields = self._new_rollout()
            if position % per_pass == 0 or not batches:
                batches = self._cut(per_pass, begins=position % per_pass == 0)
            self._position = position + 1
            # Lightning asks for nothing after the last batch, so the end is announced before it.
            if (position + 1) % per_rollout == 0 and self.num_timesteps >= self.total_timesteps:
                self.learner_trainer.should_stop = True
                # The epoch ends here, should the run be resumed with a larger total_timesteps.
                self._position = length
            self.minibatch_weight = self._weight(batches, position)
            yield batches[position % per_pass]
            position += 1

    def _new_rollout(self) -> Batch:
        """Collects, lets the module prepare, and flattens [T, N] to the valid rows."""
        trainer, collector = self.trainer, self.collector
        assert trainer is not None
        learner: Any = trainer.lightning_module
        precision = trainer.precision_plugin.forward_context
        takes_any = collector.mode != AutoresetMode.NEXT_STEP or (self.has_learner and learner.experience.takes_empty)
        with evaluation_mode(learner.modules()), torch.no_grad():
            if self._ahead is not None:
                self._finish_ahead()
            rollout, self._next = self._next, None
            # Where every environment only reset, there is nothing to learn from, and no transition is lost.
            while rollout is None or not (takes_any or rollout["valid"].any()):
                collector.report()
                with precision():
                    rollout = collector.collect(rollout_act(learner), self.n_steps, learner.device)
            collector.report()
            self.after_collecting(rollout["valid"])
            if self._ahead is not None and self.num_timesteps < self.total_timesteps:
                self._ahead.begin(learner, precision)
            with precision():
                prepared = prepared_by(collector, learner, rollout)
        valid = prepared.pop("valid", rollout["valid"])
        if collector.mode != AutoresetMode.NEXT_STEP:
            return tree_map(lambda x: x.flatten(0, 1), prepared)
        return tree_map(lambda x: x[valid], prepared)

    def _finish_ahead(self) -> None:
        """Waits for the rollout that the thread is collecting."""
        if (rollout := self._ahead.take()) is not None:
            self._next = rollout

    def _cut(self, n_minibatches: int, begins: bool) -> list[Batch]:
        """The rollout in its order, a new one where a pass begins, cut into minibatches."""
        fields: Any = self._fields
        if n_minibatches == 1:
            self._order = None
            return [fields]  # the order of transitions does not matter
        if begins or self._order is None:
            self._order = torch.randperm(len(tree_leaves(fields)[0]), generator=self._shuffler)
        order = self._order
        if len(order) < n_minibatches:
            raise UsageError(
                f"batch_size={self.batch_size} cuts n_steps={self.n_steps} into {n_minibatches} "
                f"minibatches, and all rows of the rollout but {len(order)} are resets "
                "(autoreset_mode=next_step); give a larger batch_size or n_steps"
            )
        shuffled = tree_map(lambda x: x[order.to(x.device)], fields)
        sizes = self.sizes(len(order))
        return [tree_map(lambda x, i=i: x.split(sizes)[i], shuffled) for i in range(n_minibatches)]

    # ---------------------------------------------------------------- state

    @property
    def _layout(self) -> dict[str, int]:
        names = ("n_envs", "n_steps", "batch_size", "n_epochs", "rollouts_per_epoch")
        layout = {name: getattr(self, name) for name in names}
        layout["length"] = self.rollouts_per_epoch * self._batches_per_rollout
        if self.n_minibatches is not None:
            layout["n_minibatches"] = self.n_minibatches
        return {**layout, "graph": True} if self._is_recorded else layout

    def rank_state(self) -> dict[str, Any]:
        if self._ahead is not None:  # it steps the environments, which are asked for their episodes
            self._finish_ahead()
        if self._recorded is not None:
            self._recorded.read_episodes()
        state = super().rank_state()
        return {**state, "fields": None, "order": None} if self.rollout_is_used_up else state

    def load_rank_state(self, state: dict[str, Any]) -> None:
        super().load_rank_state(state)
        self._find_position(state["layout"], state.get("preparation", {}))

    def _find_position(self, saved: dict[str, int], prepared_for: dict[str, Any]) -> None:
        """Finds the minibatch at which a run resumes under the settings that it has now."""
        is_ahead = self._next is not None
        if self.hparams["rollouts_per_epoch"] is None and self._position % saved["length"]:
            # It depends on total_timesteps, which may change on resume; this epoch ends with the value with which it
            # began.
            self.rollouts_per_epoch = self._resolved["rollouts_per_epoch"] = saved["rollouts_per_epoch"]
            count_evaluations(self.learner_trainer, self.eval_freq, self.transitions_per_epoch, again=True)
        # Other minibatches can be cut from a rollout that was collected ahead, but its steps are those of the old run.
        begun = is_ahead and saved["n_steps"] != self.n_steps
        self._position = resumed_position(self._position, saved, self._layout, begun)
        half_used = self.has_learner and (self._fields is not None or is_ahead)
        here = preparation(self.learner) if half_used else {}
        for name, value in here.items():
            if (before := prepared_for.get(name, value)) != value:
                raise UsageError(
                    f"{name}={value!r} (it has {before!r}): the checkpoint is from the "
                    "middle of an epoch, and its rollout was prepared for the old setting; resume with that, "
                    "or from a finished run"
                )


def _nearest_divisor(size: int, wanted: int) -> int:
    """Returns the divisor of ``size`` that is nearest to ``wanted``, the smaller of two equally near."""
    # A divisor beyond `limit` is farther away than 1 or, where `wanted` is larger, than `size` itself.
    limit = min(size, 2 * wanted)
    near = [d for d in range(1, limit + 1) if size % d == 0] or [1]
    return min(near, key=lambda d: abs(d - wanted))


if TYPE_CHECKING:

    def _is_a_source(datamodule: RolloutDataModule) -> RolloutSource:
        return datamodule  # mypy compares the two
