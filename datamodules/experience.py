"""The base of all datamodules: arguments, checkpoints, the run's Trainer and ranks."""

import os
from typing import Any

import lightning as L
import torch

from rl_modules.common.checkpoint_file import LoadsDataCheckpoints
from rl_modules.common.hooks import keep_hooks
from rl_modules.common.pairing import check_pairing
from rl_modules.core.settings import Declared


class Experience(Declared, LoadsDataCheckpoints, L.LightningDataModule):
    """What an algorithm learns from; a subclass adds ``train_dataloader`` and the seed of all random streams."""

    #: Kind of experience, which an algorithm states too.
    kind: str
    seed: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keep_hooks(cls)

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            check_pairing(self.trainer.lightning_module, self)

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
