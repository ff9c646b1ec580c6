"""Preferences: pairs of answers to one prompt, of which one was chosen."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from datamodules.language.base import Batch, LanguageDataModule, Record
from datamodules.language.judgements import as_judgement, encode_judgements
from datamodules.language.notices import notice
from datamodules.language.pairs import Pairs
from datamodules.language.preference_forms import as_preference
from datamodules.language.records import NothingUsable, place_of
from datamodules.language.sequences import pack
from datamodules.language.sources import load_records
from datamodules.language.streaming import STREAM_STEPS
from datamodules.language.whole_steps import announce_rest, counts_epochs, whole_steps
from datamodules.loader import LazyLoader
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import changed, fixed, setting
from rl_modules.language.contract import PairLearner, PredictsAnswers


class PreferenceDataModule(LanguageDataModule):
    """Preferences from a file, a dataset, or a task that generates them: pairs of answers, or single judged answers.

    A record has ``prompt``, ``chosen``, ``rejected`` and optionally a ``margin`` in units of reward and the
    ``probability`` with which the chosen answer wins. Without ``prompt``, the common beginning of both answers is the
    prompt. Answers are texts or lists of chat messages. For a module that learns from single answers (its attribute
    ``unpaired`` is true, as :class:`~rl_modules.KTO`'s), a record may instead have ``prompt``, ``completion`` and
    ``label``, true where the answer is good; pairs become two such records, and "pairs" below are answers.

    One epoch is one pass over the pairs, in an order of its own; it leaves out the last pairs, which do not fill an
    optimizer step.

    While streaming, a policy's reference reads every pair that it meets, because the number of pairs, and so the table
    of its log-probabilities, has no end.
    """

    kind = "preferences"
    required: tuple[str, ...] = ("prompt", "chosen", "rejected")
    eval_required: tuple[str, ...] = ("prompt", "chosen", "rejected")
    texts = ("completion", "chosen", "rejected")

    max_length: int | None = setting(
        None, "maximum number of tokens of prompt, answer and EOS together; None: the model's limit. ``overlong`` "
        "selects what happens to longer ones", least=2)  # fmt: skip
    packing: bool | None = setting(
        None, "concatenate prompt, chosen and rejected answer in one row with other pairs, so that prompts are "
        "computed once and little is padded; scores and steps do not change. The mask's memory grows with the square "
        "of the longest pair. None: for the steps in which it saves work, if the model supports it; False: one row per "
        "answer")  # fmt: skip
    demonstrations_path: str | None = setting(
        None, "JSONL, parquet, arrow or csv file of ``prompt`` and ``completion`` whose mean reward is to be 0, for a "
        "reward model; None: the task's own demonstrations, or the chosen answers of a file or dataset")  # fmt: skip
    n_demonstrations: int = setting(256, "how many of them are scored", least=1)
    task = changed(
        says="a task that makes preferences (``paths``), or the import path of one; None: ``path`` or "
        "``dataset``")  # fmt: skip
    n_eval = 1024
    # No completions are written.
    answer_after, reward_funcs, reward_time_limit_s = fixed(None), fixed(None), fixed(None)
    reward_workers, reward_overlap, correct_threshold = fixed(1), fixed(False), fixed(1.0)
    eval_num_generations, eval_temperature = fixed(1), fixed(0.0)
    eval_top_p, eval_max_completion_length = fixed(None), fixed(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train_pairs = self.eval_pairs = Pairs([], [], [])
        self.demonstration_ids: list[Tensor] = []
        self._position = 0  # micro-batches handed out since the run began
        self._has_saved = False  # since the run began

    def _setup(self, stage: str) -> None:
        # For single answers `reshape` takes rows of either form, and refuses others.
        single = self.unpaired and self.task is None
        self.required = ("prompt",) if single else type(self).required
        self.eval_required = ("prompt",) if single else type(self).eval_required
        super()._setup(stage)
        self.train_pairs = as_pairs(self.train_records if isinstance(self.train_records, list) else [])
        self.eval_pairs = as_pairs(self.eval_records)
        if stage != "fit":
            return
        if single and self.stream is not None and self.streaming_buffer == 1:
            raise UsageError("streaming_buffer=1 leaves KTO no other record of the block, with whose answer it matches "
                             "a prompt; give at least 2")  # fmt: skip
        if self._n_micro > self.batch_size:
            raise UsageError(f"trainer.accumulate_grad_batches={self._n_micro} is more than the batch_size="
                             f"{self.batch_size} pairs that it divides")  # fmt: skip
        if not self.demonstration_ids and self._scores_demonstrations:
            self.demonstration_ids = self._load_demonstrations()
        if self.stream is None and counts_epochs(self.trainer):
            size = self.batch_size * self._world_size
            announce_rest(len(self.train_records), size, "are left out of it: another pass has another order")
        self._position, self._has_saved = 0, False

    @property
    def policy(self) -> PairLearner:
        """The module in training."""
        return cast(PairLearner, super().policy)

    def _packs(self, pairs: Pairs, packed: list[Tensor], padded: list[Tensor]) -> bool:
        """Whether rows are packed; needs the model.

        Args:
            pairs: all of them.
            packed: those of each micro-batch, if rows are packed.
            padded: the same if they are not.
        """
        wanted, can = self.packing, self.policy.can_pack
        if wanted and not can:
            raise UsageError("packing=true needs a model that keeps the texts of a row apart by a mask and positions "
                             "(no sliding window, ALiBi or recurrent state; attn_implementation sdpa or eager); set "
                             "packing=false")  # fmt: skip
        if wanted is not None or not can:
            return bool(wanted)
        size = getattr(self.policy, "hidden_size", 1024)
        return sum(work_of(pairs, part, True, size) for part in packed) < sum(
            work_of(pairs, part, False, size) for part in padded
        )

    @property
    def unpaired(self) -> bool:
        """Whether the module in training learns from single answers."""
        return bool(getattr(self.policy, "unpaired", False))

    @property
    def reads_all(self) -> bool:
        return self.unpaired

    @property
    def _scores_demonstrations(self) -> bool:
        """Whether the module measures its rewards from demonstrations, as a reward model does and a policy does not.

        Raises:
            UsageError: demonstrations_path is given to a module that reads none.
        """
        scores = bool(getattr(self.policy, "scores_demonstrations", True))
        if not scores and (path := self.demonstrations_path) is not None:
            raise UsageError(f"demonstrations_path={path!r} is not read by {type(self.policy).__name__}, whose rewards "
                             "have no zero to set; leave it out")  # fmt: skip
        return scores

    # ---------------------------------------------------------------- records and tokens

    def encoding(self) -> dict[str, Any]:
        return {**super().encoding(), "unpaired": self.unpaired}

    def forget_records(self) -> None:
        super().forget_records()
        self.demonstration_ids = []

    def reshape(self, row: Record, place: str) -> Record:
        """Converts any form of a preference to ``prompt`` and two answers, or ``completion`` and ``label``; checks the
        values.
        """
        if self.unpaired:
            return as_judgement(row, place)
        if row.get("label") is not None and row.get("completion") is not None and row.get("chosen") is None:
            raise UsageError(f"{place}: 'completion' and 'label' are a judgement of one answer, from which KTO learns; "
                             f"{type(self.policy).__name__} needs chosen and rejected")  # fmt: skip
        return as_preference(row, place)

    def records_per_row(self, records: Iterator[Record]) -> int:
        """Returns 2 where single answers are learned from and there is a pair among the first hundred records."""
        return 2 if self.unpaired and any("chosen" in record for record in islice(records, 100)) else 1

    def encode(self, records: list[Record]) -> list[Record]:
        """Adds both sequences as token ids; refuses or drops pairs that are too long, and drops pairs of equal
        answers.
        """
        if self.unpaired:
            return encode_judgements(self, records, self._limit)
        prompts, sides = self.encode_answers(records, "chosen", "rejected")
        limit = self._limit
        kept: list[Record] = []
        equal = overlong = 0
        for i, (record, prompt, chosen, rejected) in enumerate(zip(records, prompts, *sides, strict=True)):
            length = len(prompt) + max(len(chosen), len(rejected))
            if length > limit:
                if self.overlong == "error":
                    raise UsageError(f"{self.source}: pair {i} has {length} tokens, {limit} are allowed; shorten it, "
                                     "raise max_length where the model takes more, or set overlong=drop")  # fmt: skip
                overlong += 1
            elif chosen == rejected:
                equal += 1
            else:
                self.refuse_empty_prompt(prompt, record)
                kept.append({**record, "prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        for count, why in ((overlong, f"are longer than {limit} tokens"), (equal, "have chosen equal to rejected")):
            if count == len(records):
                raise NothingUsable(f"{self.source}: all {count} pairs {why}; there is nothing to learn from")
            if count:
                notice(f"{self.source}: {count} of {len(records)} pairs left out, they {why}")
        if not kept:
            raise NothingUsable(f"{self.source}: of {len(records)} pairs {overlong} are longer than {limit} tokens and "
                                "the others have chosen equal to rejected; there is nothing to learn from")  # fmt: skip
        return kept

    @property
    def _limit(self) -> int:
        most, asked = self.policy.max_length, self.max_length
        if asked is not None and asked > most:
            raise UsageError(f"max_length={asked} is more than the {most} tokens that the model takes")
        return most if asked is None else asked

    def _load_demonstrations(self) -> list[Tensor]:
        """Token ids of the texts whose mean reward is to be 0."""
        n = self.n_demonstrations
        if self.demonstrations_path is None and self.task is None:
            first = self.train_records[:n] if self.stream is None else self.stream.first(n)
            ids = [record["prompt_ids"] + record["chosen_ids"] for record in first]
            return [torch.tensor(row, dtype=torch.int32) for row in ids]
        records = list(load_records(
            task=self.task if self.demonstrations_path is None else None, path=self.demonstrations_path, split="train",
            # A finite task may have fewer than are wanted.
            n=None if self.task is not None and self.task.size is not None else n, seed=self.seed,
            required=("prompt", "completion"),
        )[:n])  # fmt: skip
        prompts, (completions,) = self.encode_answers(records, "completion")
        ids = [p + c for p, c in zip(prompts, completions, strict=True)]
        fitting = [torch.tensor(row, dtype=torch.int32) for row in ids if len(row) <= self._limit]
        if not fitting:
            raise UsageError(f"none of {len(ids)} demonstrations has at most {self._limit} tokens; give others with "
                             "demonstrations_path")  # fmt: skip
        if len(fitting) < len(ids):
            notice(f"{len(ids) - len(fitting)} of {len(ids)} demonstrations left out, they are longer than "
                           f"{self._limit} tokens")  # fmt: skip
        return fitting

    def refuse_empty_prompt(self, ids: list[int], record: Record) -> None:
        """Refuses a pair or judgement without a prompt, except for a reward model, which reads whole texts.

        Args:
            ids: tokens of the prompt.
            record: as it was read.

        Raises:
            UsageError: names its file and line.
        """
        if not ids and isinstance(self.policy, PredictsAnswers):
            place = place_of(record, "")
            raise UsageError(f"{self.source}: a prompt is empty{place and f' ({place})'}; write one, or leave the row "
                             "out: the first token of an answer needs something that predicts it")  # fmt: skip

    # ---------------------------------------------------------------- training batches

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole optimizer steps in one pass over the pairs, at least 1; a fixed number while streaming. Pairs
        that are left over are in no step of this pass.
        """
        if self.stream is not None:
            return STREAM_STEPS
        return whole_steps(len(self.train_records), self.batch_size * self._world_size)

    def train_dataloader(self) -> LazyLoader:
        return self.training_loader(self.steps_per_epoch, self._micro_batches)

    def _micro_batches(self) -> Iterator[Batch]:
        """Yields one pass, from the checkpoint's position."""
        n_micro = self._n_micro
        length = self.steps_per_epoch * n_micro
        step: list[Batch] = []
        for position in range(self._position % length, length):
            part = position % n_micro
            if part == 0 or not step:
                step = self._step(self._position // n_micro)
            self._position += 1
            yield step[part]

    def _step(self, number: int) -> list[Batch]:
        """This rank's micro-batches of one optimizer step; see :func:`collate` for what they hold.

        Besides, ``step_pairs``: this rank's pairs in the step; ``step_chosen_tokens``: tokens of the step's chosen
        answers, the mean over ranks; ``n_micro``: this rank's micro-batches; ``num_tokens``: tokens of the step's
        pairs or judged answers with their prompts, over all ranks, recorded once, with its last micro-batch.
        """
        n_micro = self._n_micro
        pairs, records, rows = self._drawn(number)
        rows = rows[pairs.longest[rows].argsort(stable=True)]
        # Neighbours in length go to different ranks, so that these have equally much to do.
        own = rows[self._rank :: self._world_size]
        # Padding is least with equal lengths in a micro-batch; packing is best with short and long ones mixed.
        mixed, alike = [own[i::n_micro] for i in range(n_micro)], list(own.tensor_split(n_micro))
        packs = self._packs(pairs, mixed, alike)
        # As in TRL: the mismatched answers, which estimate KTO's KL, don't count.
        tokens = int(pairs.lengths[rows, :2].sum() if self.unpaired else pairs.total[rows].sum())
        chosen_tokens = int(pairs.lengths[rows, 1].sum()) / self._world_size
        # A policy keeps reference log-probabilities by number only of loaded pairs, whose tokens it compares on resume.
        left_out = {"index"} if self.reads_as_needed else set()
        return [
            {
                **{k: v for k, v in collate(pairs, records, part, packs).items() if k not in left_out},
                "step_pairs": self.batch_size,
                "step_chosen_tokens": chosen_tokens,
                "n_micro": n_micro,
                "num_tokens": tokens if i == n_micro - 1 else 0,
            }
            for i, part in enumerate(mixed if packs else alike)
        ]

    def _drawn(self, number: int) -> tuple[Pairs, list[Record], Tensor]:
        """Returns all loaded pairs, their records, and the indices of those of optimizer step ``number`` over all
        ranks.
        """
        if isinstance(self.train_records, list) and self.stream is None:
            return self.train_pairs, self.train_records, self.pairs_of_step(number)
        size = self.batch_size * self._world_size
        records = self.records(self._positions(number))
        pairs = as_pairs(records)
        if isinstance(self.policy, PredictsAnswers):
            self.policy.check_pairs(pairs, self.source)
        return pairs, records, torch.arange(size)

    def pairs_of_step(self, number: int) -> Tensor:
        """Returns the training pairs of an optimizer step over all ranks, [batch_size · ranks].

        Args:
            number: of the step since the start of the run; the pairs depend only on it, the seed and the records.
        """
        return torch.tensor([self.record_at(position) for position in self._positions(number)])

    def _positions(self, number: int) -> range:
        """Returns the positions of an optimizer step's pairs in the endless stream."""
        size, n = self.batch_size * self._world_size, len(self.train_records)
        epoch, place = divmod(number, self.steps_per_epoch)
        # If there are fewer pairs than in a step, they repeat endlessly; otherwise each pass has its own order.
        start = number * size if size > n else epoch * n + place * size
        return range(start, start + size)

    # ---------------------------------------------------------------- evaluation

    def evaluation(self) -> LazyLoader:
        """Yields this rank's share of the held-out pairs, from the shortest to the longest."""
        return self._held_out(self.eval_pairs.longest.argsort(stable=True))

    def predict_dataloader(self) -> LazyLoader:
        """Yields held-out pairs in the order of their source, each batch with its ``texts``."""
        return self._held_out(torch.arange(len(self.eval_pairs)), texts=True)

    def _held_out(self, order: Tensor, texts: bool = False) -> LazyLoader:
        if len(order) < self._world_size:
            raise UsageError(f"n_eval={self.n_eval} gives {len(order)} held-out pairs, less than one for "
                             f"each of {self._world_size} ranks")  # fmt: skip
        sizes = [len(part) for part in self.own_held_out(len(order), self.eval_batch_size)]
        # Neighbours in length go to different ranks.
        parts = order[self._rank :: self._world_size][: sum(sizes)].split(sizes)

        def play() -> Iterator[Batch]:
            for part in parts:
                batch = collate(self.eval_pairs, self.eval_records, part, self._packs(self.eval_pairs, [part], [part]))
                if texts:
                    columns = ("prompt", "completion", "label") if self.unpaired else ("prompt", "chosen", "rejected")
                    batch["texts"] = [{name: self.eval_records[i][name] for name in columns} for i in part.tolist()]
                yield batch

        return LazyLoader(len(parts), play)

    def demonstrations(self) -> LazyLoader:
        """Yields this rank's share of the demonstrations in batches of ``tokens`` [b, T], ``length`` [b] and ``weight``
        [b].

        Every rank has as many; the last ones' weight may be 0.
        """
        ids, world = sorted(self.demonstration_ids, key=len), self._world_size
        share, size = -(-len(ids) // world), self.eval_batch_size

        def play() -> Iterator[Batch]:
            for start in range(0, share, size):
                numbers = [i * world + self._rank for i in range(start, min(start + size, share))]
                weight = torch.tensor([float(i < len(ids)) for i in numbers])
                yield {**padded([ids[min(i, len(ids) - 1)] for i in numbers]), "weight": weight}

        return LazyLoader(-(-share // size), play)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream of pairs; everything else follows from the seed."""
        self._has_saved = True
        return {"position": self._position, "micro_batches": self._n_micro, "batch_size": self.batch_size,
                "ranks": self._world_size, "pairs": len(self.train_records)}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            UsageError: the checkpoint's steps have another size, or other pairs.
        """
        if not self.is_fitting:
            return
        # Lightning's batch-size finder returns to the state that this fit wrote before its first step.
        own = self._has_saved and state_dict["position"] == 0
        here = self.state_dict()
        for name, argument in (("ranks", "trainer.devices"), ("batch_size", "data.batch_size"),
                               ("micro_batches", "trainer.accumulate_grad_batches"),
                               ("pairs", "the number of training pairs")):  # fmt: skip
            if not own and state_dict[name] != here[name]:
                raise UsageError(f"{argument}={here[name]} differs from the checkpoint's {state_dict[name]}; resume "
                                 "with as many")  # fmt: skip
        self._position = state_dict["position"]


def as_pairs(records: list[Record]) -> Pairs:
    """Returns the token ids of encoded records."""
    return Pairs(*([record[name] for record in records] for name in ("prompt_ids", "chosen_ids", "rejected_ids")))


def collate(pairs: Pairs, records: list[Record], index: Tensor, packing: bool) -> Batch:
    """Collates pairs into one batch.

    Args:
        pairs: the records' tokens.
        records: pairs, optionally with ``margin`` and ``probability``.
        index: which ones, [b].
        packing: see :meth:`~datamodules.language.pairs.Pairs.batch`.

    Returns:
        What :meth:`~datamodules.language.pairs.Pairs.batch` returns; ``index``; ``margin`` [b], 0 where none is given;
        ``probability`` [b] that the chosen one wins, NaN where it is not known; ``label`` [b] bool of judgements.
    """
    chosen = [records[i] for i in index.tolist()]
    labels = {}
    if chosen and "label" in chosen[0]:
        labels = {"label": torch.tensor([record["label"] for record in chosen], dtype=torch.bool)}
    return {
        **pairs.batch(index, packing),
        **labels,
        "index": index,
        "margin": torch.tensor([float(record.get("margin") or 0.0) for record in chosen]),
        "probability": torch.tensor([_probability(record) for record in chosen]),
    }


def work_of(pairs: Pairs, index: Tensor, packing: bool, hidden_size: int) -> float:
    """Returns the work of a forward pass, in tokens: the places of its rows, and 1 for every 8 · ``hidden_size`` pairs
    of places that attention compares, which cost as much as a token's matrix products of 16 · ``hidden_size``²
    weights.

    A causal kernel skips the half of a row's pairs that lies above the diagonal; with the mask of packed rows it
    computes all.

    Args:
        pairs: their lengths.
        index: those of one batch.
        packing: see :meth:`~datamodules.language.pairs.Pairs.batch`.
        hidden_size: width of the model's layers.
    """
    if packing:
        total = pairs.lengths[index].sum(-1)
        width = int(total.max())
        rows, compared = int(pack(total.tolist(), width)[0].max()) + 1, float(width)
    else:
        width = int(pairs.longest[index].max())
        rows, compared = 2 * len(index), width / 2
    return rows * width * (1 + compared / (8 * hidden_size))


def _probability(record: Record) -> float:
    known = record.get("probability")
    return math.nan if known is None else float(known)


def padded(sequences: list[Tensor]) -> dict[str, Tensor]:
    """Returns ``tokens`` [b, T], padded with zeros after each end, and ``length`` [b]."""
    return {
        "tokens": pad_sequence(sequences, batch_first=True).long(),
        "length": torch.tensor([len(ids) for ids in sequences]),
    }
