"""Base class of the language datamodules: records, their tokens, the order of training, evaluation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from datamodules.experience import LazyLoader
from datamodules.language import dialogues
from datamodules.language.arguments import evaluate_every
from datamodules.language.loading import RecordLoading
from datamodules.language.mixture import by_source
from datamodules.language.reward_arguments import trainer_state
from datamodules.language.reward_calls import RewardFunctions
from datamodules.language.reward_threads import EarlyRewards
from datamodules.language.rewards import load_reward_funcs
from datamodules.language.rows import joined_sequences
from datamodules.language.tasks.answers import prompt_text, text_of, voted_answer
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.common.seeding import stream_seed
from rl_modules.core.settings import warn_of_idle
from rl_modules.core.state import forget_state
from rl_modules.language.sampling import Completions
from rl_modules.language.text.encoding import reads_alike

Record = dict[str, Any]
Batch = dict[str, Any]


class LanguageDataModule(RecordLoading):
    """Base of the language datamodules: records from exactly one of ``task`` (made here), ``path`` (a JSONL, parquet,
    arrow or csv file) and ``dataset``, their tokens, their order, and evaluations on completions.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        funcs = [] if self.task is None else self.task.reward_funcs
        if not isinstance(funcs, list | tuple) or not all(map(callable, funcs)):
            raise UsageError(
                f"task {self.task.name!r} has reward_funcs={funcs!r}, where a property that returns a "
                "list of functions should be"
            )
        if self.reward_funcs:
            funcs = load_reward_funcs(self.reward_funcs, self.task)
        if getattr(self, "environment", None) is not None:
            funcs = [*funcs, dialogues.environment]
        #: Names of the sources of records, and of the evaluation sets, that have metrics of their own.
        mixed = [] if self.mixture is None else self.mixture.sources
        self.sources = list(dict.fromkeys([*mixed, *(self.eval_path if isinstance(self.eval_path, dict) else ())]))
        if self.mixture is not None and not self.reward_funcs:
            self.mixture.require_rewards(self.sources)
        self.rewards = RewardFunctions(funcs, self.reward_time_limit_s, self.reward_workers)
        self.rewards.trainer_state = trainer_state(None, 0.0)
        # The rewards of a batch that is being written.
        self._scoring: Any = None
        self._warned_of_texts = self._warned_of_special = False

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if stage == "fit":
            forget_state(self)
        if self._encoding is not None and not reads_alike(self._encoding, self.encoding()):
            self.forget_records()
        if stage == "fit" and self.streaming:
            self.stream = self.open_stream()
        elif stage == "fit" and not self.train_records:
            self.train_records = self.load_split("train", self.n_train, not self.reads_all)
        wants_eval = self.n_held_out and (stage != "fit" or self.eval_steps)
        if wants_eval and not self.eval_records:
            if self.task is None:
                self.require_held_out(stage == "fit")
            self.eval_records = list(self.load_split("test", self.n_held_out))
        if self.train_records or self.eval_records:
            self._encoding = self.encoding()
        if stage == "fit":
            warn_of_idle(self.declared_settings, self.hparams, self.idle_arguments())
            if batches := getattr(self.trainer, "overfit_batches", 0):
                notice(
                    f"overfit_batches={batches} repeats no batch: they are made anew in every "
                    f"pass; give n_train={self.batch_size}, a batch, to learn it by heart"
                )
            self._passes = self.order_of_records()
            evaluate_every(self.learner_trainer, self.eval_steps, self.eval_on_start)

    # ---------------------------------------------------------------- training batches

    @property
    def _n_micro(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def training_loader(self, steps: int, micro_batches: Callable[[], Iterator[Batch]]) -> LazyLoader:
        """Returns a loader of optimizer steps in micro-batches, which ``micro_batches`` makes for an epoch."""
        n_micro = self._n_micro

        def of_an_epoch() -> Iterator[Batch]:
            if (now := self._n_micro) != n_micro:
                raise UsageError(
                    f"GradientAccumulationScheduler changed accumulate_grad_batches from {n_micro} to "
                    f"{now} within the run, but Lightning keeps the number of micro-batches of batch_size="
                    f"{self.batch_size}; give one number to the Trainer"
                )
            return micro_batches()

        return LazyLoader(steps * n_micro, of_an_epoch)

    @property
    def epochs_seen(self) -> float:
        """Passes over the training records so far, which a datamodule that counts records knows."""
        return 0.0

    # ---------------------------------------------------------------- evaluation

    @property
    def can_evaluate(self) -> bool:
        """Whether there are held-out records. A task makes them; others need an argument that names them."""
        is_named = self.eval_path is not None or self.eval_split is not None
        return self.n_held_out > 0 and (self.task is not None or is_named or self.eval_steps > 0)

    def val_dataloader(self) -> Any:
        return self.evaluation() if self.n_held_out and (self.eval_steps or not self.is_fitting) else []

    def test_dataloader(self) -> Any:
        return self.evaluation()

    def predict_dataloader(self) -> Any:
        return self.held_out_completions()

    def evaluation(self) -> LazyLoader:
        """Returns the batches of ``validate`` and ``test``: completions, and what a datamodule adds to them."""
        return self.held_out_completions()

    def held_out_completions(self) -> LazyLoader:
        """Batches of completions of held-out prompts, written as they are read; see :meth:`judge` for the fields."""
        per_batch = max(1, self.eval_batch_size // self.eval_num_generations)
        batches = self.own_held_out(len(self.eval_records), per_batch)

        def play() -> Iterator[Batch]:
            for numbers in batches:
                yield self.write([self.eval_records[i] for i in numbers], list(numbers))

        return LazyLoader(len(batches), play)

    def own_held_out(self, records: int, per_batch: int) -> list[range]:
        """Returns the numbers of this rank's held-out records in batches, as many on every rank."""
        rank, ranks = self._rank, self._world_size
        share, rest = divmod(records, ranks)
        if not share:
            raise UsageError(
                f"n_eval={self.n_held_out} gives {records} held-out records, less than one for each of {ranks} ranks"
            )
        # Where weights are sharded, ranks call the model together, and must have as many records.
        if rest and isinstance(getattr(self.trainer, "strategy", None), ModelParallelStrategy):
            notice(
                f"{self.source}: {records - rest} of {records} held-out records are evaluated, for each of {ranks} "
                "ranks with sharded weights has as many; give an n_eval that they divide"
            )
            rest = 0
        first = rank * share + min(rank, rest)
        last = first + share + (rank < rest)
        starts = range(first, first + share, per_batch)
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], last], strict=True)]

    def write(self, records: list[Record], numbers: list[int]) -> Batch:
        """Returns what :meth:`judge` does of some held-out records, their tokens, and what reward functions logged."""
        k = self.eval_num_generations
        settings = {"temperature": self.eval_temperature, "top_p": self.eval_top_p}
        if self.eval_max_completion_length is not None:
            settings["max_completion_length"] = self.eval_max_completion_length
        # A prompt's seeds depend only on its number, not on the rank or on its neighbours.
        seeds = [stream_seed(self.seed, 0, "eval", i * k + j) for i in numbers for j in range(k)]
        early = self.early_rewards(records, k) if self.reward_overlap else None
        listener = None if early is None else early.on_ended
        written = self.complete(self.writer.act, records, seeds, k, on_ended=listener, **settings)
        if written.dialogues is not None:
            records = dialogues.opened(records, written, k)
        self.rewards.take_notes()  # of a call that was interrupted
        scored = self.judge(records, written, k, early)
        texts = joined_sequences([record["prompt_ids"] for record in records], written, k, self._pad_id)
        return {**scored, **texts, "logged": self.rewards.take_notes()["logged"]}

    def complete(
        self,
        act: Callable[..., Completions],
        records: Sequence[Record],
        seeds: Sequence[int],
        num_generations: int,
        **how: Any,
    ) -> Completions:
        """Returns completions of records' prompts, by the policy's ``act`` or one with its arguments."""
        if (images := self.row_images(records)) is not None:
            how["images"] = images
        return act([record["prompt_ids"] for record in records], seeds, num_generations, **how)

    def early_rewards(self, records: list[Record], num_generations: int) -> EarlyRewards | None:
        """What computes rewards while completions are written; None without any."""
        if not len(self.rewards):
            return None
        self._ready_rewards()
        self._scoring = early = EarlyRewards(self.rewards, self.policy.tokenizer, records, num_generations)
        return early

    def judge(
        self, records: list[Record], written: Any, num_generations: int, early: EarlyRewards | None = None
    ) -> Batch:
        """Decodes and scores completions of P prompts: the contract's ``JudgedCompletions`` without tokens and logs."""
        k = num_generations
        if not self._warned_of_texts:
            self._warned_of_texts = True
            self.encoder.note_completions(self.source, self.writer.settings().eos_token_id)
        lengths = written.length.tolist()
        ids = [row[:n] for row, n in zip(written.tokens.tolist(), lengths, strict=True)]
        if written.dialogues is None and len(self.rewards) and not self._warned_of_special:
            self._warned_of_special = self.encoder.note_left_out(self.source, ids)
        texts = self.policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        repeated = [record for record in records for _ in range(k)]
        self._ready_rewards()
        said: list[Any] = texts
        turns: dict[str, Any] = {}
        if written.dialogues is not None:
            texts, said, repeated, turns = dialogues.judged(self.rewards, repeated, written)
        # Metrics of an evaluation are reduced over ranks, where the device's collectives take no CPU tensor.
        scores = self.rewards(repeated, said, ids) if early is None else early.result(repeated, texts)
        if written.dialogues is not None:
            scores[[dialogue["ended"] == "failed" for dialogue in written.dialogues]] = torch.nan
        self._scoring = None
        rewards = scores.to(written.tokens.device, non_blocking=True)
        spread = self.rewards.token_rewards(scores, lengths) if self.rewards.by_token else None
        plain = list(map(text_of, said))
        first = scores[:, 0] if scores.shape[1] else None
        if self.mixture is not None:
            answers, first = self.mixture.judged(repeated, plain, scores)
        elif self.task is not None:
            answers = list(map(self.task.extract, plain))
        else:
            answers = [voted_answer(text, self.answer_after) for text in plain]
        correct = None if first is None else first >= self.correct_threshold
        if self.sources:
            self.rewards.note(by_source(repeated, self.sources, self.rewards.names, scores, correct))
        return {
            "prompts": [prompt_text(record["prompt"]) for record in repeated],
            "asked": [self.encoder.as_read(record["prompt"]) for record in repeated],
            "texts": texts,
            "rewards": rewards,
            "reward_names": self.rewards.names,
            "extra": self.rewards.extra(len(texts)),
            "token_rewards": None if spread is None else spread.to(rewards.device, non_blocking=True),
            "correct": None if correct is None else correct.view(-1, k).to(rewards.device, non_blocking=True),
            "answers": [answers[i : i + k] for i in range(0, len(answers), k)],
            "length": written.length,
            "finished": written.finished,
            **turns,
        }

    def _ready_rewards(self) -> None:
        self.rewards.trainer_state = trainer_state(self.trainer, self.epochs_seen)
        self.rewards.as_read = self._as_read
        self.rewards.by_token = getattr(self.policy, "takes_token_rewards", False)

    def _as_read(self, record: Record) -> str:
        return str(self.policy.tokenizer.decode(record["prompt_ids"]))

    def _on_exception(self, exception: BaseException) -> None:
        # Lightning does not call `teardown` then, and the process would not end before all waiting calls.
        if self._scoring is not None:
            self._scoring.stop()
        self._teardown("")

    def _teardown(self, stage: str) -> None:
        self.rewards.close()

    # ---------------------------------------------------------------- state

    def _resumed(self, position: int, saved: dict[str, Any]) -> int:
        """The position at which this run resumes a checkpoint of another layout; a UsageError if it can't."""
        return position

    def load_rank_state(self, state: dict[str, Any]) -> None:
        super().load_rank_state(state)
        self._position = self._resumed(state["position"], state["layout"])
