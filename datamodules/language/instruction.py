"""Demonstrations: prompts with the completions that a model is to learn."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor

from datamodules.language.base import Batch, LanguageDataModule, Record
from datamodules.language.conversations import as_conversation
from datamodules.language.notices import notice
from datamodules.language.records import NothingUsable
from datamodules.language.sequences import Sequences
from datamodules.language.streaming import STREAM_STEPS
from datamodules.language.whole_steps import announce_rest, counts_epochs, whole_steps
from datamodules.loader import LazyLoader
from rl_modules.common.errors import UsageError
from rl_modules.common.seeding import stream_seed
from rl_modules.core.settings import setting
from rl_modules.language.contract import PackingLearner

#: Columns that are added to records here; a source must not have columns of these names.
ADDED = ("conversation", "whole", "text_ids", "completion_mask", "learned_ids")
#: Optimizer steps whose sequences are sorted by length together.
BUCKET_STEPS = 50


class InstructionDataModule(LanguageDataModule):
    """Demonstrations (prompts and completions) in an endless shuffled stream; one epoch is about one pass over the
    records.

    Records need ``prompt`` and ``completion``, or ``messages``: a conversation of one or several turns, of which the
    assistant's count in the loss. The messages before the first assistant turn are its prompt. For records with a
    ``text`` only, all tokens count; their prompt in evaluations is the text's first word. An optimizer step takes
    ``batch_size`` sequences per rank, however they are padded, packed, or divided into micro-batches.
    """

    kind = "demonstrations"
    required = ("prompt", "completion")
    texts = ("completion",)

    completion_only_loss: bool = setting(
        True, "count only completion tokens in the loss. In a conversation these are the assistant's turns, marked by "
        "the chat template's ``{% generation %}`` blocks or found by rendering turn by turn. False: count all "
        "tokens")  # fmt: skip
    packing: bool = setting(
        False, "put several sequences into a row, each seeing only itself, in rows as wide as the longest. If a check "
        "of the first batch finds that the model mixes packed sequences, they are padded instead")  # fmt: skip
    group_by_length: bool = setting(
        False, "group sequences of similar length into steps (the sequences of 50 steps are sorted, and the steps "
        "shuffled). This saves padding but may hurt learning, because steps become homogeneous; ``packing`` saves "
        "padding without changing the steps")  # fmt: skip
    max_length: int | None = setting(
        None, "maximum number of tokens of prompt and completion together; None: the model's limit. ``overlong`` "
        "selects what happens to longer ones", least=2, unit="tokens, a prompt's and a completion's")  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequences: Sequences | None = None
        self._position = 0  # micro-batches handed out
        self._has_saved = False  # since the fit began
        self._bucket: tuple[int, list[Tensor]] = (-1, [])

    # ---------------------------------------------------------------- records

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if stage == "fit":
            if self.batch_size % self._n_micro:
                raise UsageError(f"trainer.accumulate_grad_batches={self._n_micro} does not divide batch_size="
                                 f"{self.batch_size}, the sequences of an optimizer step")  # fmt: skip
            if self.streaming and self.group_by_length:
                raise UsageError("group_by_length=true sorts all records by their lengths, which streaming=true does "
                                 "not know; set one of them")  # fmt: skip
            if self.sequences is None and isinstance(self.train_records, list) and self.stream is None:
                self.sequences = self._as_sequences(self.train_records)
            if self.stream is None and counts_epochs(self.trainer):
                announce_rest(len(self.train_records), self.batch_size * self._world_size, "begin the next pass")
            self._position, self._has_saved = 0, False
            self._bucket = (-1, [])

    @property
    def reads_all(self) -> bool:
        return self.group_by_length

    def forget_records(self) -> None:
        super().forget_records()
        self.sequences = None

    def encode(self, records: list[Record]) -> list[Record]:
        """Adds the token ids of prompts and, for demonstrations, of completions with their EOS."""
        if self.system_prompt is not None and records and all(record.get("whole") for record in records):
            raise UsageError(f"{self.source}: system_prompt={self.system_prompt!r} is read by the chat template, "
                             "through which the texts of a column 'text' do not go; leave it out, or give prompt and "
                             "completion, or messages")  # fmt: skip
        records = super().encode(records)
        for i, record in enumerate(records):
            if "conversation" in record:
                records[i] = self._encode_conversation(record, i)
            elif record.get("whole"):
                ids = self.encoder.text(record["completion"])
                records[i] = {**record, "text_ids": ids, "completion_mask": [True] * (len(ids) - 1)}
        shown = [i for i, r in enumerate(records) if r.get("completion") is not None and "text_ids" not in r]
        prompts, (answers,) = self.encode_answers([records[i] for i in shown], "completion")
        for i, prompt, answer in zip(shown, prompts, answers, strict=True):
            # What a model completes may end with more of the chat template than what comes before a whole answer.
            other = {} if prompt == records[i]["prompt_ids"] else {"learned_ids": prompt}
            records[i] |= {"completion_ids": answer, **other}
        limit = min(self.policy.max_length, self.max_length or self.policy.max_length)
        lengths = [len(first) + len(rest) for first, rest in map(_parts, records)]
        kept = [i for i, length in enumerate(lengths) if length <= limit]
        if len(kept) < len(records):
            first = next(i for i, length in enumerate(lengths) if length > limit)
            if self.overlong == "error" or not kept:
                refusal = UsageError if self.overlong == "error" else NothingUsable
                raise refusal(
                    f"{self.source}: {len(records) - len(kept)} of {len(records)} records are longer than {limit} "
                    f"tokens with their completions (record {first} has {lengths[first]}); shorten them"
                    + (", raise max_length" if limit < self.policy.max_length else "")
                    + ("" if self.overlong == "drop" else ", or set overlong=drop")
                )
            print(f"{self.source}: {len(records) - len(kept)} of {len(records)} records left out, they are longer than "
                  f"{limit} tokens with their completions")  # fmt: skip
        return [records[i] for i in kept]

    def reshape(self, row: Record, place: str) -> Record:
        """Converts a row with ``messages``, or with a list of messages as completion, into a conversation with its
        prompt.

        The prompt of a row with only ``text`` is the text's first word.
        """
        row = {name: value for name, value in row.items() if name not in ADDED}
        text = row.get("text")
        is_whole = "text" in row and all(row.get(k) is None for k in ("prompt", "messages"))
        if is_whole and row.get("completion") is None and not (isinstance(text, str) and text.strip()):
            raise UsageError(f"{place}: 'text' is {text!r}, where a text to learn should be; leave the row out")
        if is_whole and isinstance(text, str) and text.strip():
            return {**row, "prompt": text[: len(text) - len(text.lstrip())] + text.split()[0], "completion": text,
                    "whole": True}  # fmt: skip
        return as_conversation(row, place)

    def _check_ends(self) -> None:
        """Reports if no conversation's counted tokens include one that ends completions: the model would not learn to
        end them. Needs the model, whose generation config may name several.
        """
        # Of a large file the first ones: they are encoded when they are read.
        records = islice(self.train_records, 1000) if self.stream is None else self.stream.first(self.batch_size)
        learned = [record for record in records if "conversation" in record]
        tokenizer = self.policy.tokenizer
        settings = getattr(self.policy, "settings", None)  # of a module that writes completions
        stops = {tokenizer.eos_token_id} if settings is None else set(settings().eos_token_id)
        if learned and not any(
            token in stops and flag
            for record in learned
            for token, flag in zip(record["completion_ids"], record["completion_mask"], strict=True)
        ):
            known = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(stops))))
            notice(f"{self.source}: the chat template ends the assistant's turns without a token that ends "
                   f"completions ({known}), so that the model does not learn to end them; set eos_token in "
                   "tokenizer_config.json to the template's end of a turn, or add its id to eos_token_id in "
                   "generation_config.json")  # fmt: skip

    def _encode_conversation(self, record: Record, number: int) -> Record:
        """Adds ``text_ids``, a conversation's tokens, and which of them but the first count."""
        try:
            if self.completion_only_loss:
                ids, written = self.encoder.conversation(record["conversation"], record, len(record["prompt"]))
            else:
                ids = self.encoder.whole(record["conversation"], record)
                written = [True] * len(ids)
        except UsageError as error:
            raise UsageError(f"{self.source}: record {number}: {error}") from error
        return {**record, "text_ids": ids, "completion_ids": ids[1:], "completion_mask": written[1:]}

    def _as_sequences(self, records: list[Record]) -> Sequences:
        prompts, completions = zip(*map(_parts, records), strict=True) if records else ((), ())
        masks = [record.get("completion_mask") for record in records]
        return Sequences(prompts, completions, self.completion_only_loss, masks)

    # ---------------------------------------------------------------- training batches

    def train_dataloader(self) -> LazyLoader:
        return self.training_loader(self._steps_per_epoch, self._micro_batches)

    @property
    def _steps_per_epoch(self) -> int:
        if self.stream is not None:
            return STREAM_STEPS
        return whole_steps(len(self.train_records), self.batch_size * self._world_size)

    def _micro_batches(self) -> Iterator[Batch]:
        """Yields one epoch's micro-batches, from the checkpoint's position."""
        if self._position == 0:
            self._check_ends()
        n_micro = self._n_micro
        length = self._steps_per_epoch * n_micro
        step: list[Batch] = []
        for position in range(self._position, (self._position // length + 1) * length):
            if position % n_micro == 0 or not step:
                step = self._step(position // n_micro)
            self._position = position + 1
            yield {**step[position % n_micro], "seed": stream_seed(self.seed, self._rank, "dropout", position)}

    def _step(self, number: int) -> list[Batch]:
        """This rank's micro-batches of one optimizer step.

        Returns:
            Per micro-batch the fields of :meth:`Sequences.batch`, and ``step_tokens``: tokens that count in the whole
            step, averaged over ranks, as their gradients will be; ``n_micro``; ``num_tokens``: all tokens of the step
            over all ranks, recorded once, with its last micro-batch.
        """
        n_micro = self._n_micro
        sequences, index = self._drawn(number)
        index = index[sequences.total[index].argsort(stable=True)]
        # Neighbours in length go to different ranks, so that these have equally much to do.
        own = index[self._rank :: self._world_size]
        # Padding is least with equal lengths in a micro-batch; packing is best with short and long ones mixed.
        parts = [own[i::n_micro] for i in range(n_micro)] if self._packs else list(own.tensor_split(n_micro))
        step_tokens = int(sequences.counted[index].sum()) / self._world_size
        num_tokens = int(sequences.total[index].sum())
        return [
            {
                **sequences.batch(part, self._pad_id, self._packs),
                "step_tokens": step_tokens,
                "n_micro": n_micro,
                "num_tokens": num_tokens if i == n_micro - 1 else 0,
            }
            for i, part in enumerate(parts)
        ]

    def _drawn(self, number: int) -> tuple[Sequences, Tensor]:
        """Returns all loaded sequences, and the indices of those of optimizer step ``number`` over all ranks."""
        if not self.reads_as_needed:
            assert self.sequences is not None
            return self.sequences, self._sequences_of(number)
        size = self.batch_size * self._world_size
        return self._as_sequences(self.records(range(number * size, (number + 1) * size))), torch.arange(size)

    def _sequences_of(self, number: int) -> Tensor:
        """Which sequences make optimizer step ``number``, over all ranks; a function of the seed and the number."""
        assert self.sequences is not None
        size = self.batch_size * self._world_size
        if not self.group_by_length:
            return torch.tensor([self.record_at(number * size + i) for i in range(size)])
        # If there are enough records, a bucket does not hold one twice, because both would be in the same step.
        steps = min(BUCKET_STEPS, self._steps_per_epoch)
        bucket, offset = divmod(number, steps)
        if self._bucket[0] != bucket:
            first = bucket * steps * size
            index = torch.tensor([self.record_at(first + i) for i in range(steps * size)])
            index = index[self.sequences.total[index].argsort(stable=True)]
            generator = torch.Generator().manual_seed(stream_seed(self.seed, 0, "buckets", bucket))
            order = torch.randperm(steps, generator=generator)
            self._bucket = (bucket, list(index.view(steps, size)[order]))
        return self._bucket[1][offset]

    @property
    def _packs(self) -> bool:
        """Whether rows are packed: ``packing`` is true and the model keeps texts apart. Needs the model."""
        return self.packing and cast(PackingLearner, self.policy).can_pack

    # ---------------------------------------------------------------- evaluation

    def evaluation(self) -> LazyLoader:
        """Yields batches of held-out prompts, then batches of held-out demonstrations."""
        written, shown = self.held_out_completions(), self.held_out_demonstrations()
        return LazyLoader(len(written) + len(shown), lambda: chain(written, shown))

    def held_out_demonstrations(self) -> LazyLoader:
        """Yields this rank's share of the held-out demonstrations as batches with the fields of
        :meth:`Sequences.batch`.

        Every rank has as many batches. Empty where the held-out records have no completions.
        """
        if any("completion_ids" not in record for record in self.eval_records):
            return LazyLoader(0, lambda: iter(()))
        parts = self.own_held_out(len(self.eval_records), self.eval_batch_size)
        records = [self.eval_records[i] for part in parts for i in part]

        def batches() -> Iterator[Batch]:
            sequences = self._as_sequences(records)
            for part in sequences.total.argsort(stable=True).split([len(numbers) for numbers in parts]):
                yield sequences.batch(part, self._pad_id, self._packs)

        return LazyLoader(len(parts), batches)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream; everything else follows from the seed."""
        self._has_saved = True
        return {"position": self._position, "micro_batches": self._n_micro, "batch_size": self.batch_size,
                "ranks": self._world_size}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            UsageError: the checkpoint's steps have another size.
        """
        if not self.is_fitting:
            return
        # Lightning's batch-size finder returns to the state that this fit wrote before its first step.
        own = self._has_saved and state_dict["position"] == 0
        here = self.state_dict()
        for name, argument in (("ranks", "trainer.devices"), ("batch_size", "data.batch_size"),
                               ("micro_batches", "trainer.accumulate_grad_batches")):  # fmt: skip
            if not own and state_dict[name] != here[name]:
                raise UsageError(f"{argument}={here[name]} differs from the checkpoint's {state_dict[name]}; resume "
                                 "with as many")  # fmt: skip
        self._position = state_dict["position"]


def _parts(record: Record) -> tuple[list[int], list[int]]:
    """The tokens that come first and those after them: prompt and completion, or the first token and the others."""
    if "text_ids" in record:
        return record["text_ids"][:1], record["text_ids"][1:]
    first = "learned_ids" if "learned_ids" in record else "prompt_ids"
    return record[first], record.get("completion_ids", [])
