"""Base of the datamodules that learn from records themselves: passes over them, in optimizer steps of equal size."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from datamodules.experience import LazyLoader
from datamodules.language.base import Batch, LanguageDataModule, Record
from datamodules.language.sequences import Pairs, Sequences
from datamodules.language.sources import fitting
from datamodules.language.streaming import STREAM_STEPS
from rl_modules.common.errors import require_same
from rl_modules.common.notices import notice
from rl_modules.core.settings import made
from rl_modules.core.state import persistent

if TYPE_CHECKING:
    from lightning import Trainer


Table = TypeVar("Table", Sequences, Pairs)


class PassesDataModule(LanguageDataModule, Generic[Table]):
    """Records in an endless shuffled stream, ``batch_size`` of them to an optimizer step and rank.

    A step's records depend on the seed and its number alone, however they are padded, packed, or divided into
    micro-batches and ranks.
    """

    #: What becomes of the records that fill no step of a pass, and what the records are called, for messages.
    fate = "begin the next pass"
    noun = "records"
    max_length: int | None = made()
    #: Micro-batches handed out since the run began.
    _position: int = persistent(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        #: The training and held-out records' tokens; those of a stream or of a large source are read when needed.
        self.train_table: Table = self.table([])
        self.eval_table: Table = self.table([])

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        self.eval_table = self.table(self.eval_records)
        if stage == "fit":
            self.train_table = self.table([] if self.reads_as_needed else list(self.train_records))
            if self.stream is None:
                announce_rest(self.trainer, len(self.train_records), self._step_size, self.fate)

    @abstractmethod
    def table(self, records: list[Record]) -> Table:
        """Returns the tokens of encoded records, from which batches are cut."""

    @abstractmethod
    def batch(self, table: Table, records: Sequence[Record], index: Tensor, packs: bool) -> Batch:
        """Returns the records of ``index`` as a batch, packed or padded."""

    @abstractmethod
    def step_fields(self, table: Table, index: Tensor) -> Batch:
        """Returns what all micro-batches of a step share, ``num_tokens`` among it: all its tokens, over all ranks."""

    @abstractmethod
    def packs(self, table: Table, mixed: list[Tensor], alike: list[Tensor]) -> bool:
        """Returns whether rows are packed: ``mixed`` then are the micro-batches, otherwise ``alike``."""

    @property
    def reads_as_needed(self) -> bool:
        """Whether training records are read when they are needed: those of a stream or of a large source."""
        return self.stream is not None or not isinstance(self.train_records, list)

    @property
    def limit(self) -> int:
        """Most tokens of a record."""
        return min(self.policy.max_length, self.max_length or self.policy.max_length)

    def fitting(self, lengths: list[int]) -> list[int]:
        """Numbers of the records that are short enough; others are refused, or left out with a notice."""
        remedy = "raise max_length" if self.limit < self.policy.max_length else "take a model with more positions"
        overlong = "error" if self.overlong == "error" else "drop"
        return fitting(lengths, self.limit, self.source, overlong, self.noun, remedy)

    # ---------------------------------------------------------------- training batches

    @property
    def _step_size(self) -> int:
        return self.batch_size * self._world_size

    @property
    def steps_per_epoch(self) -> int:
        """Whole optimizer steps in one pass over the records, at least 1; a fixed number while streaming."""
        return whole_steps(len(self.train_records), self._step_size) if self.stream is None else STREAM_STEPS

    def train_dataloader(self) -> LazyLoader:
        return self.training_loader(self.steps_per_epoch, self._micro_batches)

    def _micro_batches(self) -> Iterator[Batch]:
        """Yields one epoch's micro-batches, from the checkpoint's position."""
        n_micro = self._n_micro
        length = self.steps_per_epoch * n_micro
        step: list[Batch] = []
        for position in range(self._position, (self._position // length + 1) * length):
            if position % n_micro == 0 or not step:
                step = self._step(position // n_micro)
            self._position = position + 1
            yield step[position % n_micro]

    def _step(self, number: int) -> list[Batch]:
        """This rank's micro-batches of one optimizer step; ``num_tokens`` comes once, with the last one."""
        n_micro = self._n_micro
        records: Sequence[Record]
        if self.reads_as_needed:
            records = self.records(self.positions(number))
            table, index = self.table(records), torch.arange(len(records))
        else:
            records, table, index = self.train_records, self.train_table, self.rows_of_step(number)
        fields = {**self.step_fields(table, index), "n_micro": n_micro}
        index = index[table.longest[index].argsort(stable=True)]
        # Neighbours in length go to different ranks, so that these have equally much to do.
        own = index[self._rank :: self._world_size]
        # Padding is least with equal lengths in a micro-batch; packing is best with short and long ones mixed.
        mixed, alike = [own[i::n_micro] for i in range(n_micro)], list(own.tensor_split(n_micro))
        packs = self.packs(table, mixed, alike)
        return [
            {
                **self.batch(table, records, part, packs),
                **fields,
                "num_tokens": fields["num_tokens"] if i == n_micro - 1 else 0,
            }
            for i, part in enumerate(mixed if packs else alike)
        ]

    def record_at(self, position: int) -> int:
        """Number of the training record at a position of the endless shuffled stream."""
        return self._passes.at(position, len(self.train_records))

    def positions(self, number: int) -> range:
        """Returns the positions of an optimizer step's records, over all ranks, in the endless stream."""
        return range(number * self._step_size, (number + 1) * self._step_size)

    def rows_of_step(self, number: int) -> Tensor:
        """Returns the training records of an optimizer step of the run, over all ranks, [batch_size · ranks]."""
        return torch.tensor([self.record_at(position) for position in self.positions(number)])

    # ---------------------------------------------------------------- evaluation

    def held_out(self, order: Tensor) -> LazyLoader:
        """Returns this rank's share of the held-out records in batches; neighbours go to different ranks."""
        sizes = [len(part) for part in self.own_held_out(len(order), self.eval_batch_size)]
        parts = order[self._rank :: self._world_size][: sum(sizes)].split(sizes)
        table, records = self.eval_table, self.eval_records

        def batches() -> Iterator[Batch]:
            for part in parts:
                yield self.batch(table, records, part, self.packs(table, [part], [part]))

        return LazyLoader(len(parts), batches)

    # ---------------------------------------------------------------- state

    @property
    def _layout(self) -> dict[str, Any]:
        return {"trainer.accumulate_grad_batches": self._n_micro, "data.batch_size": self.batch_size}

    def _resumed(self, position: int, saved: dict[str, Any]) -> int:
        for name, value in self._layout.items() if position else ():
            require_same(name, value, saved[name])
        return position


def whole_steps(n: int, step: int) -> int:
    """Optimizer steps of ``step`` records in one pass over ``n``, at least 1."""
    return max(1, n // step)


def announce_rest(trainer: "Trainer | None", n: int, step: int, fate: str) -> None:
    """Reports if a pass leaves out a tenth of the records or more, or repeats some in a step, in a run of epochs."""
    if (getattr(trainer, "max_epochs", None) or -1) <= 0:
        return
    rest = n - whole_steps(n, step) * step
    if rest < 0:
        notice(f"batch_size: a step of {step} records repeats the {n} that there are; give a smaller one")
    elif rest >= n / 10:
        notice(f"batch_size: of {n} records, {step} to an optimizer step, the last {rest} of a pass {fate}")
