"""Preferences: pairs of answers to one prompt, of which one was chosen."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from datamodules.experience import LazyLoader
from datamodules.language.base import Batch, Record
from datamodules.language.formats import as_judgement, as_preference, decoded
from datamodules.language.on_demand import load_records
from datamodules.language.passes import PassesDataModule
from datamodules.language.sequences import Pairs
from datamodules.language.sources import NothingUsable, fitting, refuse
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.core.settings import changed, fixed, made, setting
from rl_modules.language.contract import PairLearner, PredictsAnswers
from rl_modules.language.text.records import place_of


class PreferenceDataModule(PassesDataModule[Pairs]):
    """Preferences from a file, a dataset, or a task that generates them: pairs of answers, or single judged answers.

    A record has ``prompt``, ``chosen``, ``rejected`` and optionally a ``margin`` in units of reward and the
    ``probability`` with which the chosen answer wins. Without ``prompt``, the common beginning of both answers is the
    prompt. Answers are texts or lists of chat messages, also of several turns: all that follows the prompt counts. Rows
    may be token ids: ``prompt_ids`` with ``chosen_ids`` and ``rejected_ids``, or ``completion_ids``.

    For a module that learns from single answers (its attribute ``unpaired`` is true, as
    :class:`~rl_modules.KTO`'s), a record may instead have ``prompt``, ``completion`` and ``label``, true where the
    answer is good; pairs become two such records, and "pairs" below are answers.

    One epoch is one pass over the pairs, in an order of its own; it leaves out the last pairs, which do not fill an
    optimizer step.

    While streaming, a policy's reference reads every pair that it meets, because the number of pairs, and so the table
    of its log-probabilities, has no end.
    """

    kind = "preferences"
    fate, noun = "are left out of it: another pass has another order", "pairs"
    required: tuple[str, ...] = made(("prompt", "chosen", "rejected"))
    eval_required: tuple[str, ...] = made(("prompt", "chosen", "rejected"))
    texts = ("completion", "chosen", "rejected")

    max_length: int | None = setting(
        default=None,
        says="maximum number of tokens of prompt, answer and EOS together; None: the model's limit. ``overlong`` "
        "selects what happens to longer ones",
        least=2,
    )
    overlong = changed(
        says="what to do with records that are longer: ``error``, ``drop`` with a printed count, or ``truncate``, as "
        "``truncation_mode`` says; records whose prompt leaves no room are then dropped",
        one_of=("error", "drop", "truncate"),
    )
    truncation_mode: str = setting(
        default="keep_start",
        says="what ``truncate`` keeps: ``keep_start``, the prompt and the beginning of both answers; or "
        "``keep_end``, both answers and the end of the prompt",
        one_of=("keep_start", "keep_end"),
        idle=lambda data: data.overlong != "truncate" and "without overlong=truncate",
    )
    packing: bool | None = setting(
        default=None,
        says="concatenate prompt, chosen and rejected answer in one row with other pairs, so that prompts are "
        "computed once and little is padded; scores and steps do not change. The mask's memory grows with the square "
        "of the longest pair. None: for the steps in which it saves work, if the model supports it; False: one row per "
        "answer",
    )
    demonstrations_path: str | None = setting(
        default=None,
        says="JSONL, parquet, arrow or csv file of ``prompt`` and ``completion`` whose mean reward is to be 0, for a "
        "reward model; None: the task's own demonstrations, or the chosen answers of a file or dataset",
    )
    n_demonstrations: int = setting(default=256, says="how many of them are scored", least=1)
    task = changed(
        says="a task that makes preferences (``paths``), or the import path of one; None: ``path`` or ``dataset``"
    )
    eval_path: str | None = changed(
        says="JSONL, parquet, arrow or csv file of held-out records, whatever the training records come from",
    )
    usual_n_eval = 1024
    # No completions are written.
    answer_after, reward_funcs, reward_time_limit_s = fixed(None), fixed(None), fixed(None)
    reward_workers, reward_overlap, correct_threshold = fixed(1), fixed(False), fixed(1.0)
    eval_num_generations, eval_temperature = fixed(1), fixed(0.0)
    eval_top_p, eval_max_completion_length = fixed(None), fixed(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.demonstration_ids: list[Tensor] = []

    def _setup(self, stage: str) -> None:
        # For single answers `reshape` takes rows of either form, and refuses others.
        single = self.unpaired and self.task is None
        self.noun = "answers" if self.unpaired else "pairs"
        self.required = ("prompt",) if single else type(self).required
        self.eval_required = ("prompt",) if single else type(self).eval_required
        super()._setup(stage)
        if stage != "fit":
            return
        if single and self.stream is not None and self.streaming_buffer == 1:
            raise UsageError(
                "streaming_buffer=1 leaves KTO no other record of the block, with whose answer it matches "
                "a prompt; give at least 2"
            )
        if self._n_micro > self.batch_size:
            raise UsageError(
                f"trainer.accumulate_grad_batches={self._n_micro} is more than the batch_size="
                f"{self.batch_size} pairs that it divides"
            )
        if not self.demonstration_ids and self._scores_demonstrations:
            self.demonstration_ids = self._load_demonstrations()

    @property
    def train_pairs(self) -> Pairs:
        """The training records' tokens; those of a stream or of a large source are read when they are needed."""
        return self.train_table

    @property
    def eval_pairs(self) -> Pairs:
        """The held-out records' tokens."""
        return self.eval_table

    if TYPE_CHECKING:

        @property
        def policy(self) -> PairLearner: ...

    @property
    def unpaired(self) -> bool:
        """Whether the module in training learns from single answers."""
        return bool(getattr(self.policy, "unpaired", False))

    @property
    def reads_all(self) -> bool:
        return self.unpaired

    @property
    def _scores_demonstrations(self) -> bool:
        """Whether the module measures its rewards from demonstrations, as a reward model does and a policy does not."""
        scores = bool(getattr(self.policy, "scores_demonstrations", True))
        if not scores and (path := self.demonstrations_path) is not None:
            raise UsageError(
                f"demonstrations_path={path!r} is not read by {type(self.policy).__name__}, whose rewards "
                "have no zero to set; leave it out"
            )
        return scores

    # ---------------------------------------------------------------- records and tokens

    def encoding(self) -> dict[str, Any]:
        return {**super().encoding(), "unpaired": self.unpaired}

    def forget_records(self) -> None:
        super().forget_records()
        self.demonstration_ids = []

    def reshape(self, row: Record, place: str) -> Record:
        """Converts any form of a preference to ``prompt`` and two answers, or ``completion`` and ``label``."""
        if row.get("prompt_ids") is not None:
            single = self.unpaired and row.get("chosen_ids") is None
            sides = ("completion",) if single else ("chosen", "rejected")
            row = decoded(row, place, ("prompt", *sides), self.policy.tokenizer)
        if self.unpaired:
            return as_judgement(row, place)
        if row.get("label") is not None and row.get("completion") is not None and row.get("chosen") is None:
            raise refuse(
                place,
                "label",
                "with 'completion' is a judgement of one answer, from which KTO learns; "
                f"{type(self.policy).__name__} needs chosen and rejected",
            )
        return as_preference(row, place)

    def require_images(self) -> None:
        super().require_images()
        if self.packing:
            notice(f"{self.source}: packing=true has no effect, because rows have images; each answer has its own row")

    def records_per_row(self, records: Iterator[Record]) -> int:
        """Returns 2 where single answers are learned from and there is a pair among the first hundred records."""
        return 2 if self.unpaired and any("chosen" in record for record in islice(records, 100)) else 1

    def encode(self, records: list[Record]) -> list[Record]:
        """Adds token ids; refuses or drops pairs that are too long, and drops pairs of equal answers."""
        if self.unpaired:
            return self._encode_judgements(unpair(records))
        prompts, (chosen, rejected) = self.encode_answers(records, "chosen", "rejected")
        prompts, (chosen, rejected) = self.shortened(prompts, chosen, rejected)
        kept = self.fitting([len(p) + max(len(c), len(r)) for p, c, r in zip(prompts, chosen, rejected, strict=True)])
        different = [i for i in kept if chosen[i] != rejected[i]]
        if equal := len(kept) - len(different):
            what = f"{self.source}: {equal} of {len(records)} pairs left out, they have chosen equal to rejected"
            if not different:
                raise NothingUsable(f"{what}; there is nothing to learn from")
            notice(what)
        if isinstance(self.policy, PredictsAnswers):  # a reward model reads whole texts
            self.refuse_empty_prompts(prompts, records)
        return [
            {**records[i], "prompt_ids": prompts[i], "chosen_ids": chosen[i], "rejected_ids": rejected[i]}
            for i in different
        ]

    def refuse_empty_prompts(self, prompts: list[list[int]], records: list[Record]) -> None:
        """Refuses records without a prompt, for which a chat template has tokens, too."""
        known = [ids if record["prompt"] else [] for ids, record in zip(prompts, records, strict=True)]
        super().refuse_empty_prompts(known, records)

    def _encode_judgements(self, records: list[Record]) -> list[Record]:
        """Adds token ids to judged answers and, for KL(π || π_ref), as ``rejected_ids`` those to another prompt."""
        prompts, (answers,) = self.encode_answers(records, "completion")
        prompts, (answers,) = self.shortened(prompts, answers)
        kept = self.fitting([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
        if len(kept) < 2:
            raise NothingUsable(
                f"{self.source}: {len(kept)} of {len(records)} answers are left; KTO needs at least 2, "
                "to match prompts with the answers to others"
            )
        self.refuse_empty_prompts(prompts, records)
        return [
            {
                **records[i],
                "prompt_ids": prompts[i],
                "chosen_ids": answers[i],
                "rejected_ids": answers[kept[partner]][: self.limit - len(prompts[i])],
            }
            for i, partner in zip(kept, mismatched([prompts[i] for i in kept]), strict=True)
        ]

    def encode_answers(self, records: Sequence[Record], *names: str) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Token ids of the records' prompts and answers; those of rows that came as token ids are taken as they are."""
        given = [record.get("prompt_ids") is not None for record in records]
        if not any(given):
            return super().encode_answers(records, *names)
        if not all(given):
            place = place_of(records[given.index(False)], self.source)
            raise refuse(place, "prompt_ids", "is missing, and other rows have token ids; give them in all or in none")
        sides = [[list(record[f"{name}_ids"]) for record in records] for name in names]
        return [list(record["prompt_ids"]) for record in records], sides

    def shortened(self, prompts: list[list[int]], *sides: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
        """Prompts and answers cut to ``limit`` tokens together; an answer without a token left stays, to be dropped."""
        if self.overlong != "truncate":
            return prompts, list(sides)
        if not isinstance(self.policy, PredictsAnswers):
            raise UsageError(
                "overlong='truncate' would cut the end of answers, where a reward model reads its score; "
                "set error or drop"
            )
        limit, cut = self.limit, []
        for prompt, *answers in zip(prompts, *sides, strict=True):
            if self.truncation_mode == "keep_end":
                # One prompt precedes both answers, and something must predict their first token.
                prompt = prompt[-max(1, limit - max(map(len, answers))) :]
                cut.append((prompt, *(answer[-(limit - len(prompt)) :] for answer in answers)))
            else:
                cut.append((prompt, *(answer[: max(0, limit - len(prompt))] or answer for answer in answers)))
        shorter, *rest = zip(*cut, strict=True) if cut else ([] for _ in range(1 + len(sides)))
        return list(shorter), [list(side) for side in rest]

    @property
    def limit(self) -> int:
        if self.max_length is not None and self.max_length > self.policy.max_length:
            raise UsageError(
                f"max_length={self.max_length} is more than the {self.policy.max_length} tokens that the model takes"
            )
        return super().limit

    def _load_demonstrations(self) -> list[Tensor]:
        """Token ids of the texts whose mean reward is to be 0."""
        n = self.n_demonstrations
        if self.demonstrations_path is None and self.task is None:
            first = self.train_records[:n] if self.stream is None else self.stream.first(n)
            ids = [record["prompt_ids"] + record["chosen_ids"] for record in first]
            return [torch.tensor(row, dtype=torch.int32) for row in ids]
        records = list(
            load_records(
                task=self.task if self.demonstrations_path is None else None,
                path=self.demonstrations_path,
                split="train",
                # A finite task may have fewer than are wanted.
                n=None if self.task is not None and self.task.size is not None else n,
                seed=self.seed,
                required=("prompt", "completion"),
            )[:n]
        )
        prompts, (completions,) = self.encode_answers(records, "completion")
        ids = [p + c for p, c in zip(prompts, completions, strict=True)]
        kept = fitting(
            list(map(len, ids)),
            self.limit,
            str(self.demonstrations_path or self.source),
            "drop",
            "demonstrations",
            "give others with demonstrations_path",
        )
        return [torch.tensor(ids[i], dtype=torch.int32) for i in kept]

    # ---------------------------------------------------------------- training batches

    def table(self, records: list[Record]) -> Pairs:
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        pairs = Pairs(*([record[name] for record in records] for name in names))
        if records and self.reads_as_needed and isinstance(self.policy, PredictsAnswers):
            self.policy.check_pairs(pairs, self.source)
        return pairs

    def batch(self, table: Pairs, records: Sequence[Record], index: Tensor, packs: bool) -> Batch:
        """Returns some pairs: :meth:`Pairs.batch`, ``margin``, ``probability``, ``label`` and ``index`` [b]."""
        chosen = [records[i] for i in index.tolist()]
        known = [record.get("probability") for record in chosen]
        batch: Batch = {
            **table.batch(index, packs),
            "margin": torch.tensor([float(record.get("margin") or 0.0) for record in chosen]),
            "probability": torch.tensor([math.nan if p is None else float(p) for p in known]),
        }
        if (images := self.row_images(chosen)) is not None:
            batch["images"] = images[0].joined([*images[1:], *images])
        if chosen and "label" in chosen[0]:
            batch["label"] = torch.tensor([record["label"] for record in chosen], dtype=torch.bool)
        # A policy keeps reference log-probabilities by number only of loaded pairs, whose tokens it compares on resume.
        return {**batch, "index": index} if table is self.eval_table or not self.reads_as_needed else batch

    def step_fields(self, table: Pairs, index: Tensor) -> Batch:
        # As in TRL: the mismatched answers, which estimate KTO's KL, don't count.
        tokens = int(table.lengths[index, :2].sum() if self.unpaired else table.total[index].sum())
        chosen = int(table.lengths[index, 1].sum()) / self._world_size
        return {"step_pairs": self.batch_size, "step_chosen_tokens": chosen, "num_tokens": tokens}

    def packs(self, table: Pairs, mixed: list[Tensor], alike: list[Tensor]) -> bool:
        if self.has_images:
            return False
        wanted, can = self.packing, self.policy.can_pack
        if wanted and not can:
            raise UsageError(
                "packing=true needs a model that keeps the texts of a row apart by a mask and positions "
                "(no sliding window, ALiBi or recurrent state; attn_implementation sdpa or eager); set "
                "packing=false"
            )
        if wanted is not None or not can:
            return bool(wanted)
        size = getattr(self.policy, "hidden_size", 1024)
        return sum(table.work(part, True, size) for part in mixed) < sum(
            table.work(part, False, size) for part in alike
        )

    def positions(self, number: int) -> range:
        size, n = self._step_size, len(self.train_records)
        epoch, place = divmod(number, self.steps_per_epoch)
        # If there are fewer pairs than in a step, they repeat endlessly; otherwise each pass has its own order.
        start = number * size if size > n else epoch * n + place * size
        return range(start, start + size)

    # ---------------------------------------------------------------- evaluation

    def evaluation(self) -> LazyLoader:
        """Returns this rank's share of the held-out pairs, from the shortest to the longest."""
        return self.held_out(self.eval_table.longest.argsort(stable=True))

    def predict_dataloader(self) -> LazyLoader:
        """Returns held-out pairs in the order of their source, each batch with its ``texts``."""
        batches = self.held_out(torch.arange(len(self.eval_table)))
        columns = ("prompt", "completion", "label") if self.unpaired else ("prompt", "chosen", "rejected")

        def play() -> Iterator[Batch]:
            for batch in batches:
                texts = [{name: self.eval_records[i][name] for name in columns} for i in batch["index"].tolist()]
                yield {**batch, "texts": texts}

        return LazyLoader(len(batches), play)

    def demonstrations(self) -> LazyLoader:
        """Yields this rank's demonstrations: ``tokens`` [b, T], ``length`` [b], ``weight`` [b] (0: filling)."""
        ids, world = sorted(self.demonstration_ids, key=len), self._world_size
        share, size = -(-len(ids) // world), self.eval_batch_size

        def play() -> Iterator[Batch]:
            for start in range(0, share, size):
                numbers = [i * world + self._rank for i in range(start, min(start + size, share))]
                weight = torch.tensor([float(i < len(ids)) for i in numbers])
                texts = [ids[min(i, len(ids) - 1)] for i in numbers]
                yield {
                    "tokens": pad_sequence(texts, batch_first=True).long(),
                    "length": torch.tensor([len(text) for text in texts]),
                    "weight": weight,
                }

        return LazyLoader(-(-share // size), play)

    @property
    def _layout(self) -> dict[str, Any]:
        return {**super()._layout, "the number of training pairs": len(self.train_records)}


def unpair(records: list[Record]) -> list[Record]:
    """Judgements of single answers: a pair becomes a good and a bad one."""
    single: list[Record] = []
    for record in records:
        if "label" in record:
            single.append(record)
            continue
        rest = {name: value for name, value in record.items() if name not in ("chosen", "rejected", "probability")}
        single += [
            {**rest, "completion": record[side], "completion_ids": record.get(f"{side}_ids"), "label": side == "chosen"}
            for side in ("chosen", "rejected")
        ]
    return single


def mismatched(prompts: list[list[int]]) -> list[int]:
    """For each prompt the number of another one, by which its answers are compared, from half the list away on."""
    n, half = len(prompts), len(prompts) // 2
    if all(prompt == prompts[0] for prompt in prompts):
        return [(i + half) % n for i in range(n)]
    # One pass finds for each place the first later one with another prompt: thousands of equal prompts may be adjacent.
    other = [0] * n
    for place in range(2 * n - 1, -1, -1):  # the last ones are known after the first round
        here, after = place % n, (place + 1) % n
        other[here] = after if prompts[after] != prompts[here] else other[after]
    away = [(i + half) % n for i in range(n)]
    return [place if prompts[place] != prompts[i] else other[place] for i, place in enumerate(away)]
