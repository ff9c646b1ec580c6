"""Loading of the language datamodules' records: from files, datasets and tasks, to token ids, in their order."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from datamodules import language
from datamodules.language.arguments import LanguageArguments
from datamodules.language.files import only_split, open_stream, refuse_stream
from datamodules.language.formats import as_record
from datamodules.language.jsonl import Placed
from datamodules.language.mixture import MixedOrder, Mixture, held_out, task_of
from datamodules.language.on_demand import EncodedRecords, Records, load_records, task_records
from datamodules.language.sources import TEXTS, EndlessOrder, fitting, refuse
from datamodules.language.streaming import RecordStream
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.language import vision
from rl_modules.language.text.chat_template import encoder_of
from rl_modules.language.text.encoding import TextEncoder
from rl_modules.language.text.records import Record, place_of

if TYPE_CHECKING:
    from datamodules.language.images import RecordImages
    from rl_modules.language.contract import TextLearner, WritingLearner
    from rl_modules.language.vision import RowImages

#: Most training records of a file or dataset that are all encoded at the start.
LOADED = 20_000


class RecordLoading(LanguageArguments):
    """The records of exactly one of ``task``, ``path`` and ``dataset``, and their tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.task
        self.task = None if given is None else task_of(given, self.seed, self.task_kwargs)
        self.mixture = self.task if isinstance(self.task, Mixture) else None
        #: Those of a large file or dataset are encoded when they are asked for.
        self.train_records: list[Record] | EncodedRecords = []
        #: The training records while streaming; ``train_records`` is then empty.
        self.stream: RecordStream | None = None
        self.eval_records: list[Record] = []
        self._passes = EndlessOrder(self.seed)
        self._encoder: TextEncoder | None = None
        self._warned_of_ends = False
        #: Reads the records' images; None: none has been met.
        self.images: RecordImages | None = None
        # Of the records; None: there are none yet.
        self._encoding: dict[str, Any] | None = None

    def encoding(self) -> dict[str, Any]:
        """Returns the module's settings that the records' token ids depend on; another module may have others."""
        return {"tokenizer": self.policy.tokenizer, "max_length": self.policy.max_length}

    def forget_records(self) -> None:
        """Drops the encoded records, to load them for another module; a subclass drops what it made of them."""
        self.train_records, self.eval_records = [], []
        self._encoding = self.images = None

    def records_per_row(self, records: Iterator[Record]) -> int:
        """Returns how many records :meth:`encode` makes of a streamed row; ``records`` reads those of the source."""
        return 1

    @property
    def reads_all(self) -> bool:
        """Whether the training records are needed all at once, so that those of a large source are loaded too."""
        return False

    def load_split(self, split: str, n: int | None, as_read: bool = False) -> "list[Record] | EncodedRecords":
        """Returns ``n`` records (None: all) with ``prompt_ids``; ``as_read`` encodes a large source when needed."""
        is_train = split == "train"
        required = self.required if is_train else self.eval_required
        at_most = not is_train and self.n_eval is None
        if self.task is not None and self.mixture is None and (is_train or self.eval_path is None):
            return self._encode_and_report(task_records(self.task, split, n, required, at_most))
        # A task compares texts.
        texts = TEXTS if self.task is not None and self.mixture is None else self.texts
        checks: dict[str, Any] = {"required": required, "reshape": self.reshape, "texts": texts, "at_most": at_most}
        how = {"columns": self.columns, "answer_after": self.answer_after, "seed": self.seed, **checks}
        if not is_train and isinstance(self.eval_path, dict):
            return self._encode_and_report(held_out(self.eval_path, self.n_held_out, **how))
        if self.mixture is not None and (is_train or self.eval_path is None):
            return self._encode_and_report(self.mixture.load(split, n, **checks))
        source: dict[str, Any] = {"path": self.path, "dataset": self.dataset, "dataset_config": self.dataset_config}
        source["dataset_split"] = self.dataset_split if is_train else self.held_out_split
        if not is_train and self.eval_path is not None:
            source = {"path": self.eval_path}
        elif is_train and not isinstance(self.dataset, str | None):
            refuse_stream(self.dataset)
        records = load_records(**source, n=n, as_read=as_read, **how)
        if not isinstance(records, Records) or len(records) <= LOADED:
            return self._encode_and_report(list(records))
        longest = min(self.policy.max_length, getattr(self, "max_length", None) or self.policy.max_length) - 1
        return EncodedRecords(records, self._encode_and_report, longest, self.source)

    def open_stream(self) -> RecordStream:
        """Returns the training records, read as they are needed."""
        rows = open_stream(self.path, self.dataset, self.dataset_config, self.dataset_split)
        name = self.path or self.dataset
        folder = Path(name).parent if isinstance(name, str) and Path(name).is_file() else None
        checks = (self.columns, self.answer_after, self.required, self.reshape, self.texts, folder)

        def to_records(placed: Iterable[Placed]) -> Iterator[Record]:
            return (as_record(row, place, *checks) for place, row in placed)

        def encode(placed: list[Placed]) -> list[Record]:
            return self._encode_and_report(list(to_records(placed))) if placed else []

        per_row = self.records_per_row(to_records(rows(0)))
        return RecordStream(rows, encode, self.streaming_buffer, self.seed, self.source, per_row)

    def require_held_out(self, fits: bool) -> None:
        """Refuses to evaluate a run on its training rows, unless ``eval_path`` asks for it; then prints a message."""
        path, dataset = self.eval_path, self.dataset
        if isinstance(path, dict):
            return
        if path is not None:
            if fits and self.path is not None and Path(path).resolve() == Path(self.path).resolve():
                notice(
                    f"eval_path={path} is the file of path: evaluations read what the run trains on, and "
                    "the best checkpoint is the one that knows it best"
                )
            return
        if self.path is not None:
            raise UsageError("evaluation needs eval_path, a JSONL file of held-out records; or set eval_steps=0")
        own = None if isinstance(dataset, str | None) else only_split(dataset)
        if own == "" or (own and fits and self.held_out_split.partition("[")[0] != own):
            raise UsageError(
                f"eval_split={self.held_out_split!r} is no part of dataset, a Dataset or stream whose rows are all "
                "trained on; give eval_path or a dict of splits, or divide a Dataset by dataset_split="
                f"'{own or 'train'}[:90%]' and eval_split='{own or 'train'}[90%:]', or set eval_steps=0"
            )

    def _encode_and_report(self, records: list[Record]) -> list[Record]:
        if any(record.get("images") for record in records):
            self._read_images(records)
        encoded = self.encode(records)
        self.encoder.report_unknown(self.source)
        return encoded

    def reshape(self, row: Record, place: str) -> Record:
        """Converts a row of a file or dataset, found at ``place``, to a record's form before its checks."""
        return row

    @property
    def source(self) -> str:
        """Name of the records' source, for messages and names: the task, file or dataset."""
        if self.mixture is not None:
            return " and ".join(self.mixture.sources)
        names = (self.hparams[name] for name in ("task", "path", "dataset"))
        return next(str(name) for name in names if name is not None)

    def encode(self, records: list[Record]) -> list[Record]:
        """Adds token ids to records; prompts that the model can't take are refused, or dropped."""
        prompts = self.cut_prompts(self.encoder.prompts([record["prompt"] for record in records], records))
        self.refuse_empty_prompts(prompts, records)
        kept = fitting([len(ids) for ids in prompts], self.policy.max_length - 1, self.source, self.overlong)
        return [{**records[i], "prompt_ids": prompts[i]} for i in kept]

    def cut_prompts(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the prompts as a subclass cuts those that are too long."""
        return prompts

    # ---------------------------------------------------------------- images

    @property
    def has_images(self) -> bool:
        """Whether records have images."""
        return self.images is not None

    def _read_images(self, records: list[Record]) -> None:
        """Adds the texts that stand for the records' images."""
        if self.images is None:
            self.require_images()
            self.images = language.RecordImages(self.policy.image_reader)
        for record in records:
            record["image_texts"] = self.images.texts(record)

    def require_images(self) -> None:
        """Refuses images where the module or this datamodule's settings can't have them."""
        if not getattr(self.policy, "takes_images", False):
            raise UsageError(
                f"{self.source} has images, from which {type(self.policy).__name__} does not learn; SFT, DPO, KTO, "
                "GRPO and RLOO do, or leave the column out"
            )
        if (sampler := getattr(self.policy, "hparams", {}).get("sampler", "native")) != "native":
            raise UsageError(f"{self.source} has images, which sampler={sampler} does not take; take native")

    def row_images(self, records: Sequence[Record]) -> "list[RowImages] | None":
        """The images of each record; None where there are none."""
        return None if self.images is None else [self.images.of(record) for record in records]

    def refuse_empty_prompts(self, prompts: list[list[int]], records: list[Record]) -> None:
        """Refuses records without a prompt."""
        for i, ids in enumerate(prompts):
            if not ids:
                place = place_of(records[i], f"{self.source}: record {i}")
                raise refuse(
                    place,
                    "prompt",
                    "is empty, where a text should be: the first token of an answer needs "
                    "something that predicts it; write one, or leave the row out",
                )

    @property
    def encoder(self) -> Any:
        """The encoder of texts and messages to the policy's tokens."""
        tokenizer = self.policy.tokenizer
        known = self._encoder
        if known is None or known.tokenizer is not tokenizer or known.reads_images != self.has_images:
            if self.images is not None:
                settings = self.system_prompt, dict(self.chat_template_kwargs or {})
                self._encoder = vision.ImageEncoder(tokenizer, self.images.reader.placeholder, *settings)
                return self._encoder
            self._encoder = encoder_of(tokenizer, self.chat_template, self.system_prompt, self.chat_template_kwargs)
        return self._encoder

    def encode_answers(self, records: Sequence[Record], *names: str) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Token ids of the records' prompts and of the named columns' answers; see :meth:`TextEncoder.answered`."""
        if records and self.encoder.chats and not self._warned_of_ends:
            self._warned_of_ends = self.encoder.note_demonstrations(self.source)
        prompts = [record["prompt"] for record in records]
        sides = [[record[name] for record in records] for name in names]
        return self.encoder.answered(prompts, *sides, records=records)

    @property
    def policy(self) -> "TextLearner":
        """The module in training, which provides the tokenizer and the context length."""
        return cast("TextLearner", self.learner_trainer.lightning_module)

    @property
    def writer(self) -> "WritingLearner":
        """The same module, as a writer of completions."""
        return cast("WritingLearner", self.policy)

    @property
    def _pad_id(self) -> int:
        return int(self.policy.tokenizer.pad_token_id)

    # ---------------------------------------------------------------- order

    def order_of_records(self) -> EndlessOrder:
        """Returns the order of the training records, which a run begins with."""
        if self.mixture is None or not self.train_records:
            return EndlessOrder(self.seed)
        weights = self.mixture.weights
        return MixedOrder(self.seed, list(self.train_records), weights, lambda: getattr(self, "_segments", []))

    def records(self, positions: Sequence[int]) -> list[Record]:
        """Returns the training records at positions of the endless shuffled stream, the same on every rank."""
        if self.stream is not None:
            return [self.stream[position] for position in positions]
        rows = self.train_records
        numbers = [self._passes.at(position, len(rows)) for position in positions]
        return [rows[number] for number in numbers] if isinstance(rows, list) else rows.take(numbers)
