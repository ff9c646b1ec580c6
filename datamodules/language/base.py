"""Base class of the language datamodules: records, their tokens, the order of training, evaluation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, overload

from lightning.pytorch.strategies import ModelParallelStrategy

from datamodules.experience import Experience
from datamodules.language.arguments import (
    check_arguments,
    check_chat_template,
    name_of_dataset,
    named_functions,
    require_held_out,
)
from datamodules.language.dataset_files import refuse_stream
from datamodules.language.early_rewards import EarlyRewards
from datamodules.language.encoded_records import EncodedRecords
from datamodules.language.encoding import TextEncoder, reads_alike
from datamodules.language.endings import note_completions, note_demonstrations
from datamodules.language.eval_steps import evaluate_every
from datamodules.language.notices import notice
from datamodules.language.order import EndlessOrder
from datamodules.language.records import TEXTS, as_record, place_of
from datamodules.language.rewards import RewardFunctions, load_reward_func, rewards_of
from datamodules.language.sequences import joined_sequences
from datamodules.language.sources import Records, check_prompt_lengths, load_records
from datamodules.language.streaming import RecordStream, open_stream
from datamodules.language.tasks import make_task
from datamodules.language.text import prompt_text, voted_answer
from datamodules.language.trainer_state import TrainerState, trainer_state
from datamodules.loader import LazyLoader
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed
from rl_modules.core.settings import setting
from rl_modules.language.contract import TextLearner, WritingLearner

#: Most training records of a file or dataset that are all encoded at the start.
LOADED = 20_000
Record = dict[str, Any]
Batch = dict[str, Any]


class LanguageDataModule(Experience):
    """Base of the language datamodules; one of them adds ``train_dataloader``.

    Records come from exactly one of ``task`` (made here), ``path`` (a JSONL, parquet, arrow or csv file) and
    ``dataset``.
    """

    #: Columns that training records must have, and held-out ones.
    required: tuple[str, ...] = ("prompt",)
    called_elsewhere = "the model and its learning rate belong to the module, steps and devices to lightning.Trainer"
    eval_required: tuple[str, ...] = ("prompt",)
    #: Columns of files and datasets that are read as text; reward functions get the others as they are.
    texts: tuple[str, ...] = ()

    task: Any = setting(
        None, "a built-in task (addition, reverse, sort, countdown, paths), ``reasoning_gym:<dataset>``, or the import "
        "path of a Task; None: ``path`` or ``dataset``", kind=str | None, positional=True, attribute="")  # fmt: skip
    task_kwargs: dict[str, Any] | None = setting(None, "the task's own settings")
    path: str | None = setting(None, "JSONL, parquet, arrow or csv file of training records")
    eval_path: str | None = setting(
        None, "JSONL, parquet, arrow or csv file of held-out records, whatever the training records come "
        "from")  # fmt: skip
    dataset: Any = setting(
        None, "hub name, directory or file that ``datasets`` reads; in Python also a ``datasets.Dataset`` or "
        "``DatasetDict``", kind=str | None, stores=name_of_dataset)  # fmt: skip
    dataset_config: str | None = setting(None, "the hub dataset's configuration")
    dataset_split: str = setting("train", "split to train on, or a part of it, ``train[:90%]``")
    eval_split: str = setting("test", "split of the dataset to evaluate on, or a part of it; without ``eval_path``")
    columns: dict[str, str] | None = setting(
        None, "source column of each record column, ``{prompt: question}``, or a template of several, ``{prompt: "
        '"{context} {question}"}``; None: same names')  # fmt: skip
    answer_after: str | None = setting(None, "keep only the part of the answer after this text, such as ``####``")
    system_prompt: str | None = setting(
        None, "first message of every conversation without a system message of its own, for models with a chat "
        "template")  # fmt: skip
    chat_template: bool | None = setting(
        None, "render prompts with the tokenizer's chat template; None: where it has one",
        check=check_chat_template)  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, "variables of the chat template, such as ``{enable_thinking: false}``; a record's own column of that "
        "name wins")  # fmt: skip
    overlong: str = setting(
        "error", "what to do with records that the model can't take: ``error``, or ``drop`` with a printed count",
        one_of=("error", "drop"))  # fmt: skip
    streaming: bool = setting(
        False, "read training records as they are needed, so that they need not fit into memory: from a JSONL, "
        "parquet, arrow or csv file, a hub dataset, or in Python an ``IterableDataset``. Held-out records are "
        "loaded")  # fmt: skip
    streaming_buffer: int = setting(
        10_000, "records that are shuffled together while streaming; two such blocks are in memory",
        least=1)  # fmt: skip
    n_train: int | None = setting(
        None, "training records; None: all (10,000 of a task with more than 100,000 questions, or without an end)",
        least=1)  # fmt: skip
    n_eval: int = setting(256, "held-out records per evaluation, over all ranks; 0: none", least=0)
    batch_size: int = setting(
        64, "sequences (or pairs) per optimizer step and rank; ``trainer.accumulate_grad_batches`` divides it into "
        "micro-batches without changing the step", least=1)  # fmt: skip
    reward_funcs: Any = setting(
        None, "one or several names or import paths of reward functions (TRL's signature), with settings as "
        "``{length_reward: {target: 20}}``; None: the task's own, and none without a task. The first one decides "
        "whether a completion is right: its value must reach ``correct_threshold``",
        kind=list[str | dict[str, Any]] | str | dict[str, Any] | None, stores=named_functions)  # fmt: skip
    reward_time_limit_s: float | None = setting(
        None, "longest that one reward function may take for one batch; None: no limit", above=0)  # fmt: skip
    reward_workers: int = setting(
        1, "reward calls that run at once, in threads; above 1 a function gets the batch in parts, each of whole "
        "prompts. For functions that wait for a service or a process, and may be called from several threads",
        least=1)  # fmt: skip
    reward_overlap: bool = setting(
        False, "call the reward functions on a prompt's completions as soon as they have ended, while others are "
        "written. Each function then gets the completions of one prompt per call, from threads")  # fmt: skip
    correct_threshold: float = setting(1.0, "least value of the first reward function that counts as right")
    eval_steps: int = setting(
        0, "optimizer steps between evaluations, in place of the Trainer's ``val_check_interval``; 0: none",
        least=0)  # fmt: skip
    eval_on_start: bool = setting(
        True, "where there are evaluations, evaluate before the first update too. A resumed run does not repeat "
        "it")  # fmt: skip
    eval_num_generations: int = setting(1, "completions per held-out prompt, the k of pass@k and cons@k", least=1)
    eval_temperature: float = setting(0.0, "of those completions; 0: the likeliest words", least=0)
    eval_top_p: float | None = setting(None, "nucleus of those completions; None: all words", above=0, most=1)
    eval_max_completion_length: int | None = setting(None, "tokens; None: the module's", least=1)
    eval_batch_size: int = setting(256, "completions (or pairs) that are computed together", least=1)
    seed: int = setting(0, "the source of every stream of randomness: tasks, order, sampling, new weights", least=0)

    def __post_init__(self) -> None:
        check_arguments(self.hparams)
        task = self.hparams["task"]
        self.task = None if task is None else make_task(task, **{"seed": self.seed, **(self.task_kwargs or {})})
        given = self.reward_funcs
        specs: Any = [given] if isinstance(given, str | dict) or callable(given) else given
        if not specs and self.task is not None:
            specs = rewards_of(self.task)
        funcs = [load_reward_func(spec, self.task) for spec in specs or ()]
        self.rewards = RewardFunctions(funcs, self.reward_time_limit_s, self.reward_workers)
        self.rewards.trainer_state = TrainerState()
        #: Those of a large file or dataset are encoded when they are asked for.
        self.train_records: list[Record] | EncodedRecords = []
        #: The training records while streaming; ``train_records`` is then empty.
        self.stream: RecordStream | None = None
        self.eval_records: list[Record] = []
        # The rewards of a batch that is being written.
        self._scoring: EarlyRewards | None = None
        self._passes = EndlessOrder(self.seed)
        self._encoder: TextEncoder | None = None
        self._warned_of_ends = self._warned_of_texts = False
        # Settings with which the records were encoded; None: there are no records yet.
        self._encoding: dict[str, Any] | None = None

    # ---------------------------------------------------------------- records and tokens

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if self._encoding is not None and not reads_alike(self._encoding, self.encoding()):
            self.forget_records()
        if stage == "fit" and self.streaming:
            self.stream = self.open_stream()
        elif stage == "fit" and not self.train_records:
            self.train_records = self.load_split("train", self.n_train, not self.reads_all)
        wants_eval = self.n_eval and (stage != "fit" or self.eval_steps)
        if wants_eval and not self.eval_records:
            require_held_out(self, stage == "fit")
            self.eval_records = self.load_split("test", self.n_eval)
        if self.train_records or self.eval_records:
            self._encoding = self.encoding()
        if self.eval_records and self.eval_num_generations > 1 and self.eval_temperature == 0:
            notice(f"eval_num_generations={self.eval_num_generations} completions of a prompt are all the same at "
                   "eval_temperature=0; set it above 0 for pass@k")  # fmt: skip
        if stage == "fit":
            if batches := getattr(self.trainer, "overfit_batches", 0):
                notice(f"overfit_batches={batches} repeats no batch: they are made anew in every "
                       f"pass; give n_train={self.batch_size}, a batch, to learn it by heart")  # fmt: skip
            self._passes = EndlessOrder(self.seed)
            evaluate_every(self.learner_trainer, self.eval_steps, self.eval_on_start)

    def encoding(self) -> dict[str, Any]:
        """Returns the module's settings that the records' token ids depend on; another module may have others."""
        return {"tokenizer": self.policy.tokenizer, "max_length": self.policy.max_length}

    def forget_records(self) -> None:
        """Drops the encoded records, to load them for another module; a subclass drops what it made of them."""
        self.train_records, self.eval_records = [], []
        self._encoding = None

    def open_stream(self) -> RecordStream:
        """Returns the training records, read as they are needed."""
        rows = open_stream(self.path, self.dataset, self.dataset_config, self.dataset_split)

        def to_record(found: tuple[str, Record]) -> Record:
            place, row = found
            return as_record(row, place, self.columns, self.answer_after, self.required, self.reshape, self.texts)

        def encode(read: list[tuple[str, Record]]) -> list[Record]:
            return self._encode_and_report([to_record(found) for found in read]) if read else []

        per_row = self.records_per_row(map(to_record, rows(0)))
        return RecordStream(rows, encode, self.streaming_buffer, self.seed, self.source, per_row)

    def records_per_row(self, records: Iterator[Record]) -> int:
        """Returns how many records :meth:`encode` makes of a streamed row that it does not leave out.

        Args:
            records: those of the source before encoding; an iterator that reads on demand.
        """
        return 1

    @property
    def reads_all(self) -> bool:
        """Whether the training records are needed all at once, so that those of a large source are loaded too."""
        return False

    @property
    def reads_as_needed(self) -> bool:
        """Whether training records are read when they are needed: those of a stream or of a large source."""
        return self.stream is not None or isinstance(self.train_records, EncodedRecords)

    @overload
    def load_split(self, split: str, n: int | None) -> list[Record]: ...

    @overload
    def load_split(self, split: str, n: int | None, as_read: bool) -> list[Record] | EncodedRecords: ...

    def load_split(self, split: str, n: int | None, as_read: bool = False) -> list[Record] | EncodedRecords:
        """Returns the ``train`` or ``test`` records of the source, with prompts as token ids in ``prompt_ids``.

        Args:
            split: of a task or dataset.
            n: so many of them; None: all.
            as_read: encode those of a large source when they are asked for.
        """
        training = split == "train"
        if not training and self.eval_path is not None:
            source: dict[str, Any] = {"path": self.eval_path}
        else:
            if training and not isinstance(self.dataset, str | None):
                refuse_stream(self.dataset)
            source = {"task": self.task, "path": self.path, "dataset": self.dataset}
        records = load_records(
            **source,
            dataset_config=self.dataset_config,
            dataset_split=self.dataset_split if training else self.eval_split,
            columns=self.columns,
            answer_after=self.answer_after,
            split=split,
            n=n,
            seed=self.seed,
            required=self.required if training else self.eval_required,
            reshape=self.reshape,
            # A task compares texts.
            texts=self.texts if self.task is None else TEXTS,
            as_read=as_read,
        )
        if not isinstance(records, Records) or len(records) <= LOADED:
            return self._encode_and_report(list(records))
        longest = min(self.policy.max_length, getattr(self, "max_length", None) or self.policy.max_length) - 1
        return EncodedRecords(records, self._encode_and_report, longest, self.source)

    def _encode_and_report(self, records: list[Record]) -> list[Record]:
        encoded = self.encode(records)
        self.encoder.report_unknown(self.source)
        return encoded

    def reshape(self, row: Record, place: str) -> Record:
        """Converts a row of a file or dataset to the form of a record, before its columns are checked.

        Args:
            row: its columns, renamed as ``columns`` says.
            place: the file and line, or the dataset and row, for messages.
        """
        return row

    @property
    def source(self) -> str:
        """Name of the records' source, for messages and names: the task, file or dataset."""
        names = (self.hparams[name] for name in ("task", "path", "dataset"))
        return next(str(name) for name in names if name is not None)

    def encode(self, records: list[Record]) -> list[Record]:
        """Adds token ids to records; prompts that the model can't take are refused, or dropped."""
        prompts = self.encode_prompts([record["prompt"] for record in records], records)
        for i, ids in enumerate(prompts):
            if not ids:
                place = place_of(records[i], self.source)
                raise UsageError(f"{place}: record {i} has an empty prompt, where a text should be that a completion "
                                 "can start from; write one, or leave the row out")  # fmt: skip
        limit = self.policy.max_length - 1
        kept = check_prompt_lengths([len(ids) for ids in prompts], limit, self.source, self.overlong)
        return [{**records[i], "prompt_ids": prompts[i]} for i in kept]

    @property
    def encoder(self) -> TextEncoder:
        """The encoder of texts and messages to the policy's tokens."""
        tokenizer = self.policy.tokenizer
        if self._encoder is None or self._encoder.tokenizer is not tokenizer:
            self._encoder = TextEncoder(tokenizer, self.chat_template, self.system_prompt, self.chat_template_kwargs)
        return self._encoder

    def encode_prompts(
        self, prompts: list[str | list[dict[str, Any]]], records: list[Record] | None = None
    ) -> list[list[int]]:
        """Token ids of prompts, texts or chat messages; see :meth:`TextEncoder.prompts`."""
        return self.encoder.prompts(prompts, records)

    def encode_answers(self, records: Sequence[Record], *names: str) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Token ids of the records' prompts, and for each named column of the answers to them; see
        :meth:`TextEncoder.answered`.
        """
        if records and not self._warned_of_ends:
            self._warned_of_ends = note_demonstrations(self.encoder, self.source)
        prompts = [record["prompt"] for record in records]
        sides = [[record[name] for record in records] for name in names]
        return self.encoder.answered(prompts, *sides, records=records)

    @property
    def policy(self) -> TextLearner:
        """The module in training, which provides the tokenizer and the context length."""
        return cast(TextLearner, self.learner_trainer.lightning_module)

    @property
    def writer(self) -> WritingLearner:
        """The same module, as a writer of completions."""
        return cast(WritingLearner, self.policy)

    @property
    def _pad_id(self) -> int:
        return int(self.policy.tokenizer.pad_token_id)

    # ---------------------------------------------------------------- training batches

    @property
    def _n_micro(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def training_loader(self, steps: int, micro_batches: Callable[[], Iterator[Batch]]) -> LazyLoader:
        """Returns a loader of as many optimizer steps, each in ``trainer.accumulate_grad_batches`` micro-batches.

        Args:
            steps: of an epoch.
            micro_batches: makes those of an epoch. Where the Trainer's number has changed by then, a UsageError is
                raised instead: Lightning would end the epoch after as many micro-batches as before.
        """
        n_micro = self._n_micro

        def of_an_epoch() -> Iterator[Batch]:
            if (now := self._n_micro) != n_micro:
                raise UsageError(f"GradientAccumulationScheduler changed accumulate_grad_batches from {n_micro} to "
                                 f"{now} within the run, but Lightning keeps the number of micro-batches of batch_size="
                                 f"{self.batch_size}; give one number to the Trainer")  # fmt: skip
            return micro_batches()

        return LazyLoader(steps * n_micro, of_an_epoch)

    # ---------------------------------------------------------------- order

    def record_at(self, position: int) -> int:
        """Which training record stands at a position of the endless shuffled stream, see :class:`EndlessOrder`."""
        return self._passes.at(position, len(self.train_records))

    def record(self, position: int) -> Record:
        """Returns the training record at a position of the endless shuffled stream, the same on every rank."""
        return self.records([position])[0]

    def records(self, positions: Sequence[int]) -> list[Record]:
        """Returns the training records at positions of the endless shuffled stream."""
        if self.stream is not None:
            return [self.stream[position] for position in positions]
        numbers = [self.record_at(position) for position in positions]
        rows = self.train_records
        return rows.take(numbers) if isinstance(rows, EncodedRecords) else [rows[number] for number in numbers]

    @property
    def epochs_seen(self) -> float:
        """Passes over the training records so far, which a datamodule that counts records knows."""
        return 0.0

    # ---------------------------------------------------------------- evaluation

    @property
    def can_evaluate(self) -> bool:
        """Whether there are held-out records. A task makes them; a file or dataset needs an argument that names
        them.
        """
        return bool(self.n_eval) and (self.task is not None or self.eval_path is not None or bool(self.eval_steps))

    def val_dataloader(self) -> Any:
        if not self.n_eval or (self.is_fitting and not self.eval_steps):
            return []
        return self.evaluation()

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
        """Returns the numbers of this rank's held-out records, in batches; every rank has as many batches.

        Args:
            records: number of held-out records over all ranks.
            per_batch: records per batch; the last one may have one more.

        Raises:
            UsageError: there are fewer records than ranks.
        """
        rank, ranks = self._rank, self._world_size
        share, rest = divmod(records, ranks)
        if not share:
            raise UsageError(f"n_eval={self.n_eval} is less than one record for each of {ranks} ranks")
        # Where weights are sharded, ranks call the model together, and must have as many records.
        if rest and isinstance(getattr(self.trainer, "strategy", None), ModelParallelStrategy):
            notice(f"{self.source}: {records - rest} of {records} held-out records are evaluated, for each of {ranks} "
                   "ranks with sharded weights has as many; give an n_eval that they divide")  # fmt: skip
            rest = 0
        first = rank * share + min(rank, rest)
        last = first + share + (rank < rest)
        starts = range(first, first + share, per_batch)
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], last], strict=True)]

    def write(self, records: list[Record], numbers: list[int]) -> Batch:
        """One batch of held-out completions, with the evaluation's own sampling settings and seeds.

        Returns:
            What :meth:`judge` returns, the texts as ``tokens`` [P·K, T] right-padded with ``prompt_length`` [P·K], and
            ``logged``, see ``RewardFunctions.take_logged``.
        """
        k = self.eval_num_generations
        settings = {"temperature": self.eval_temperature, "top_p": self.eval_top_p}
        if self.eval_max_completion_length is not None:
            settings["max_completion_length"] = self.eval_max_completion_length
        # A prompt's seeds depend only on its number, not on the rank or on its neighbours.
        seeds = [stream_seed(self.seed, 0, "eval", i * k + j) for i in numbers for j in range(k)]
        prompts = [record["prompt_ids"] for record in records]
        early = self.early_rewards(records, k)
        listener = None if early is None else early.on_ended
        written = self.writer.act(prompts, seeds, k, on_ended=listener, **settings)
        self.rewards.take_logged()  # of a call that was interrupted
        scored = self.judge(records, written, k, early)
        texts = joined_sequences(prompts, written, k, self._pad_id)
        return {**scored, **texts, "logged": self.rewards.take_logged()}

    def early_rewards(self, records: list[Record], num_generations: int) -> EarlyRewards | None:
        """Returns the object that computes rewards while completions are written; None without ``reward_overlap``."""
        if not self.reward_overlap or not len(self.rewards):
            return None
        self._ready_rewards()
        self._scoring = EarlyRewards(self.rewards, self.policy.tokenizer, records, num_generations)
        return self._scoring

    def _on_exception(self, exception: BaseException) -> None:
        # Lightning does not call `teardown` then, and the process would not end before all waiting calls.
        if self._scoring is not None:
            self._scoring.stop()
            self._scoring = None
        self.rewards.close()

    def _teardown(self, stage: str) -> None:
        self.rewards.close()

    def judge(
        self, records: list[Record], written: Any, num_generations: int, early: EarlyRewards | None = None
    ) -> Batch:
        """Decodes completions and scores them.

        Args:
            records: P, one per prompt.
            written: the sampler's ``Completions`` of P · num_generations rows.
            num_generations: completions per prompt.
            early: was notified of each completion as it ended, and holds their rewards.

        Returns:
            ``prompts`` and ``texts`` (lists of P·K strings), ``asked`` (the prompts as texts, or as messages for the
            chat template), ``rewards`` [P·K, F] (NaN: not applicable),
            ``reward_names``, ``token_rewards`` [P·K, L, F] where a function gives one number per token (else None),
            ``extra`` (P·K dictionaries of what the functions logged by ``log_extra``),
            ``correct`` [P, K] bool (None where there is no reward function), ``answers`` (P
            lists of K), ``length`` and ``finished`` [P·K].
        """
        tokenizer = self.policy.tokenizer
        if not self._warned_of_texts:
            self._warned_of_texts = True
            note_completions(self.encoder, self.source, self.writer.settings().eos_token_id, len(self.rewards) > 0)
        lengths = written.length.tolist()
        ids = [row[:n] for row, n in zip(written.tokens.tolist(), lengths, strict=True)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        repeated = [record for record in records for _ in range(num_generations)]
        self._ready_rewards()
        # Metrics of an evaluation are reduced over ranks, where the device's collectives take no CPU tensor.
        scores = self.rewards(repeated, texts, ids) if early is None else early.result(repeated, texts)
        self._scoring = None
        rewards = scores.to(written.tokens.device, non_blocking=True)
        spread = self.rewards.take_token_rewards(scores, lengths)
        correct = None
        if len(self.rewards):
            correct = (rewards[:, 0] >= self.correct_threshold).view(-1, num_generations)
        answers = [
            voted_answer(text, self.answer_after) if self.task is None else self.task.extract(text) for text in texts
        ]
        k = num_generations
        return {
            "prompts": [prompt_text(record["prompt"]) for record in repeated],
            "asked": [self.encoder.as_read(record["prompt"]) for record in repeated],
            "texts": texts,
            "rewards": rewards,
            "reward_names": self.rewards.names,
            "extra": self.rewards.take_extra(len(texts)),
            "token_rewards": None if spread is None else spread.to(rewards.device, non_blocking=True),
            "correct": correct,
            "answers": [answers[i : i + k] for i in range(0, len(answers), k)],
            "length": written.length,
            "finished": written.finished,
        }

    def _ready_rewards(self) -> None:
        self.rewards.trainer_state = trainer_state(self.trainer, self.epochs_seen)
        self.rewards.as_read = self._as_read
        self.rewards.by_token = getattr(self.policy, "takes_token_rewards", False)

    def _as_read(self, record: Record) -> str:
        """The text of a record's prompt as the model reads it."""
        return str(self.policy.tokenizer.decode(record["prompt_ids"]))
