"""The base of all datamodules: arguments, the run's Trainer and ranks, batches on demand, the state of all ranks."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod

from rl_modules.checkpoints import preparation
from rl_modules.common.stored_arguments import building
from rl_modules.core.checkpoint import restored_arrays
from rl_modules.core.checkpoint_file import read_source
from rl_modules.core.hooks import HasParts
from rl_modules.core.seams import check_pairing
from rl_modules.core.settings import Declared, made
from rl_modules.core.state import load_state, state_of
from rl_modules.ranks import gather_ranks, state_of_rank


class LazyLoader:
    """A sized iterable that makes each batch on demand; of an unsized one Lightning prefetches a batch."""

    def __init__(self, length: int, make_batches: Callable[[], Iterator[Any]]) -> None:
        self._length = length
        self._make_batches = make_batches
        #: Called before each batch is made, when the last batch is finished and the next has not begun.
        self.before_next: Callable[[], None] | None = None
        #: Called while a batch is made, where that takes long and a checkpoint written now resumes exactly.
        self.while_waiting: Callable[[], None] | None = None

    def __len__(self) -> int:
        return self._length

    # Lightning takes a loader with these two for resumable; the datamodule has the state.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        batches = self._make_batches()
        while True:
            if self.before_next is not None:
                self.before_next()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


class ExperienceDataModule(HasParts, Declared, L.LightningDataModule):
    """What an algorithm learns from; a subclass adds ``train_dataloader`` and the seed of all random streams."""

    #: Kind of experience, which an algorithm states too.
    kind: str = made()
    seed: int = made()

    # As in Lightning: a call on a datamodule would leave that datamodule unchanged.
    @_restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = True,
        **kwargs: Any,
    ) -> Any:
        """Builds the datamodule of a checkpoint, see ``lightning.LightningDataModule.load_from_checkpoint``.

        Args:
            checkpoint_path: the file.
            map_location: as Lightning takes it.
            hparams_file: None; a checkpoint of this project holds its arguments.
            weights_only: load without running code; on by default.
            **kwargs: arguments that differ from the checkpoint's.

        Raises:
            TypeError: called on a datamodule instead of its class.
            UsageError: a file that is no checkpoint, or one that names code which this project does not register and
                that is not given again, such as an environment or a reward function by its import path.
        """
        key = "datamodule_hyper_parameters"
        saved = read_source(checkpoint_path, hparams_file, (key, "pytorch-lightning_version"))
        with building(cls, kwargs):
            given = {**restored_arrays(saved, key), **kwargs}
            return super().load_from_checkpoint(checkpoint_path, map_location, None, weights_only, **given)

    def _setup(self, stage: str) -> None:
        if self.trainer is not None:
            check_pairing(self.trainer.lightning_module, self)

    # ---------------------------------------------------------------- state

    @property
    def _layout(self) -> dict[str, Any]:
        """The settings that decide what a position in the run is."""
        return {}

    def rank_state(self) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint: what the class declares, and the settings on which it depends; a
        subclass first completes what is under way.
        """
        own = {**state_of(self), "layout": self._layout}
        prepared = preparation(self.trainer and self.trainer.lightning_module)
        return {**own, "preparation": prepared} if prepared else own

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`rank_state` returned."""
        load_state(self, state, self.learner_trainer.strategy.root_device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of every rank, which a run needs to resume exactly."""
        return {"ranks": gather_ranks(self.rank_state(), self._rank, self._world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.is_fitting:
            self.load_rank_state(state_of_rank(state_dict["ranks"], self._rank, self._world_size))

    # ---------------------------------------------------------------- the run

    @property
    def learner_trainer(self) -> L.Trainer:
        """The Trainer of the run."""
        if self.trainer is None:
            raise RuntimeError("no Trainer is attached: Trainer.fit(module, datamodule=...) comes first")
        return self.trainer

    @property
    def is_fitting(self) -> bool:
        """Whether the Trainer is in a ``fit``, whatever its stage."""
        return self.trainer is not None and self.trainer.state.fn == "fit"

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else int(os.environ.get("RANK", 0))

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _largest_over_ranks(self, value: float) -> float:
        """Returns the largest value of any rank; all ranks call it together."""
        if self._world_size == 1:
            return value
        strategy = self.learner_trainer.strategy
        own = torch.tensor(value, dtype=torch.float64, device=strategy.root_device)
        return float(strategy.reduce(own, reduce_op="max"))


def evaluate_on_start(trainer: L.Trainer, wanted: bool) -> None:
    """Makes a fit that has not begun start with a whole evaluation, as Lightning's sanity check, or without one."""
    tries = getattr(trainer, "fast_dev_run", False)
    trainer.num_sanity_val_steps = float("inf") if wanted and not tries else 0
