"""Demonstrations: prompts with the completions that a model is to learn."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import cast

import torch
from torch import Tensor

from datamodules.experience import LazyLoader
from datamodules.language.base import Batch, Record
from datamodules.language.formats import as_conversation
from datamodules.language.passes import PassesDataModule
from datamodules.language.sequences import Sequences
from datamodules.language.sources import refuse
from datamodules.language.truncation import shortened
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.common.seeding import stream_seed
from rl_modules.core.settings import changed, setting
from rl_modules.core.state import transient
from rl_modules.language.contract import PackingLearner
from rl_modules.language.text.encoding import Messages

#: Columns that are added to records here; a source must not have columns of these names.
ADDED = ("image_texts", "conversation", "whole", "text_ids", "completion_mask", "learned_ids")
#: Optimizer steps whose sequences are sorted by length together.
BUCKET_STEPS = 50


class InstructionDataModule(PassesDataModule[Sequences]):
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
        default=True,
        says="count only completion tokens in the loss. In a conversation these are the assistant's turns, marked by "
        "the chat template's ``{% generation %}`` blocks or found by rendering turn by turn. False: count all "
        "tokens",
    )
    packing: bool = setting(
        default=False,
        says="put several sequences into a row, each seeing only itself, in rows as wide as the longest. If a check "
        "of the first batch finds that the model mixes packed sequences, they are padded instead",
    )
    group_by_length: bool = setting(
        default=False,
        says="group sequences of similar length into steps (the sequences of 50 steps are sorted, and the steps "
        "shuffled). This saves padding but may hurt learning, because steps become homogeneous; ``packing`` saves "
        "padding without changing the steps",
    )
    max_length: int | None = setting(
        default=None,
        says="maximum number of tokens of prompt and completion together; None: the model's limit. ``overlong`` "
        "selects what happens to longer ones",
        least=2,
    )
    overlong = changed(
        says="what to do with records that are longer: ``error``, ``drop`` with a printed count, or ``truncate``, as "
        "``truncation_mode`` says; records of which nothing that counts is left are then dropped",
        one_of=("error", "drop", "truncate"),
    )
    truncation_mode: str = setting(
        default="keep_start",
        says="what ``truncate`` keeps: ``keep_start``, the beginning; or ``keep_end``, the end. Of a conversation this "
        "is its first or last whole turns, and of the first or last one alone, where that is too long, tokens",
        one_of=("keep_start", "keep_end"),
        idle=lambda data: data.overlong != "truncate" and "without overlong=truncate",
    )

    #: Whether the notice of records that are cut was printed.
    _told_of_cut: bool = transient(False)
    #: The present bucket's number, and its steps.
    _bucket: tuple[int, list[Tensor]] = transient((-1, []))

    # ---------------------------------------------------------------- records

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if stage == "fit":
            if self.batch_size % self._n_micro:
                raise UsageError(
                    f"trainer.accumulate_grad_batches={self._n_micro} does not divide batch_size="
                    f"{self.batch_size}, the sequences of an optimizer step"
                )
            if self.streaming and self.group_by_length:
                raise UsageError(
                    "group_by_length=true sorts all records by their lengths, which streaming=true does "
                    "not know; set one of them"
                )

    def require_images(self) -> None:
        super().require_images()
        if self.packing:
            notice(f"{self.source}: packing=true has no effect, because rows have images; each text has its own row")

    @property
    def sequences(self) -> Sequences:
        """The training records' tokens."""
        return self.train_table

    @property
    def reads_all(self) -> bool:
        return self.group_by_length

    def encode(self, records: list[Record]) -> list[Record]:
        """Adds the token ids of prompts and, for demonstrations, of completions with their EOS."""
        if self.system_prompt is not None and records and all(record.get("whole") for record in records):
            raise UsageError(
                f"{self.source}: system_prompt={self.system_prompt!r} is read by the chat template, "
                "through which the texts of a column 'text' do not go; leave it out, or give prompt and "
                "completion, or messages"
            )
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
        records = self._cut(records) if self.overlong == "truncate" else records
        return [records[i] for i in self.fitting([len(first) + len(rest) for first, rest in map(_parts, records)])]

    def reshape(self, row: Record, place: str) -> Record:
        """Converts messages to a conversation with its prompt; of a row with only ``text`` that is the first word."""
        row = {name: value for name, value in row.items() if name not in ADDED}
        text = row.get("text")
        is_whole = "text" in row and all(row.get(k) is None for k in ("prompt", "messages"))
        if is_whole and row.get("completion") is None and not (isinstance(text, str) and text.strip()):
            raise refuse(place, "text", f"is {text!r}, where a text to learn should be; leave the row out")
        if is_whole and isinstance(text, str) and text.strip():
            return {
                **row,
                "prompt": text[: len(text) - len(text.lstrip())] + text.split()[0],
                "completion": text,
                "whole": True,
            }
        return as_conversation(row, place)

    def _check_ends(self) -> None:
        """Reports if no conversation's counted tokens include one that ends completions, by the generation config."""
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
            notice(
                f"{self.source}: the chat template ends the assistant's turns without a token that ends "
                f"completions ({known}), so that the model does not learn to end them; set eos_token in "
                "tokenizer_config.json to the template's end of a turn, or add its id to eos_token_id in "
                "generation_config.json"
            )

    def _encode_conversation(self, record: Record, number: int) -> Record:
        """Adds ``text_ids``, a conversation's tokens, and which of them but the first count."""

        def encode(messages: Messages, first: int) -> tuple[list[int], list[bool]]:
            if self.completion_only_loss:
                ids, written = self.encoder.conversation(messages, record, first)
                return ids, written
            ids = self.encoder.whole(messages, record)
            return ids, [True] * len(ids)

        whole = record["conversation"], len(record["prompt"])
        try:
            ids, written = encode(*whole)
            if self.overlong == "truncate" and len(ids) > self.limit:
                self._tell_of_cut()
                cut = shortened(*whole, encode, self.limit, self.truncation_mode == "keep_start")
                ids, written = cut if any(cut[1][1:]) else (ids, written)
        except UsageError as error:
            raise UsageError(f"{self.source}: record {number}: {error}") from error
        return {**record, "text_ids": ids, "completion_ids": ids[1:], "completion_mask": written[1:]}

    # ---------------------------------------------------------------- records that are too long

    def cut_prompts(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the ends of prompts that the model can't continue, under ``keep_end``."""
        if self.overlong != "truncate" or self.truncation_mode != "keep_end":
            return prompts
        return [ids[-(self.policy.max_length - 1) :] for ids in prompts]

    def _cut(self, records: list[Record]) -> list[Record]:
        """Records of prompt and completion, and of texts, cut to ``limit`` tokens if some of a completion is left."""
        limit, keeps_start = self.limit, self.truncation_mode == "keep_start"
        cut = []
        for record in records:
            first, rest = _parts(record)
            if len(first) + len(rest) > limit and rest and "conversation" not in record:
                self._tell_of_cut()
                whole = [*first, *rest][:limit] if keeps_start else [*first, *rest][-limit:]
                start = len(first) if keeps_start else max(1, limit - len(rest))
                if "text_ids" in record:
                    record = {**record, "text_ids": whole, "completion_mask": [True] * (limit - 1)}
                elif start < limit:
                    record = {**record, "learned_ids": whole[:start], "completion_ids": whole[start:]}
            cut.append(record)
        return cut

    def _tell_of_cut(self) -> None:
        if not self._told_of_cut:
            self._told_of_cut = True
            notice(
                f"{self.source}: records longer than {self.limit} tokens are cut to them "
                f"(truncation_mode={self.truncation_mode}); of conversations whole turns go first"
            )

    def table(self, records: list[Record]) -> Sequences:
        prompts, completions = zip(*map(_parts, records), strict=True) if records else ((), ())
        masks = [record.get("completion_mask") for record in records]
        return Sequences(prompts, completions, self.completion_only_loss, masks)

    # ---------------------------------------------------------------- training batches

    def _micro_batches(self) -> Iterator[Batch]:
        if self._position == 0:
            self._check_ends()
        first = self._position
        for position, batch in enumerate(super()._micro_batches(), first):
            yield {**batch, "seed": stream_seed(self.seed, self._rank, "dropout", position)}

    def batch(self, table: Sequences, records: Sequence[Record], index: Tensor, packs: bool) -> Batch:
        batch: Batch = table.batch(index, self._pad_id, packs)
        images = self.row_images([records[i] for i in index.tolist()])
        return batch if images is None else {**batch, "images": images[0].joined(images[1:])}

    def step_fields(self, table: Sequences, index: Tensor) -> Batch:
        # Tokens that count are averaged over ranks, as their gradients will be.
        step_tokens = int(table.counted[index].sum()) / self._world_size
        return {"step_tokens": step_tokens, "num_tokens": int(table.total[index].sum())}

    def packs(self, table: Sequences, mixed: list[Tensor], alike: list[Tensor]) -> bool:
        return self.packing and not self.has_images and cast(PackingLearner, self.policy).can_pack

    def rows_of_step(self, number: int) -> Tensor:
        if not self.group_by_length:
            return super().rows_of_step(number)
        # If there are enough records, a bucket does not hold one twice, because both would be in the same step.
        steps, size = min(BUCKET_STEPS, self.steps_per_epoch), self._step_size
        bucket, offset = divmod(number, steps)
        if self._bucket[0] != bucket:
            first = bucket * steps * size
            index = torch.tensor([self.record_at(first + i) for i in range(steps * size)])
            index = index[self.train_table.total[index].argsort(stable=True)]
            generator = torch.Generator().manual_seed(stream_seed(self.seed, 0, "buckets", bucket))
            order = torch.randperm(steps, generator=generator)
            self._bucket = (bucket, list(index.view(steps, size)[order]))
        return self._bucket[1][offset]

    # ---------------------------------------------------------------- evaluation

    def evaluation(self) -> LazyLoader:
        """Yields batches of held-out prompts, then batches of held-out demonstrations."""
        written, shown = self.held_out_completions(), self.held_out_demonstrations()
        return LazyLoader(len(written) + len(shown), lambda: chain(written, shown))

    def held_out_demonstrations(self) -> LazyLoader:
        """Returns this rank's held-out demonstrations, as of :meth:`Sequences.batch`; none without completions."""
        if any("completion_ids" not in record for record in self.eval_records):
            return LazyLoader(0, lambda: iter(()))
        return self.held_out(self.eval_table.total.argsort(stable=True))


def _parts(record: Record) -> tuple[list[int], list[int]]:
    """The tokens that come first and those after them: prompt and completion, or the first token and the others."""
    if "text_ids" in record:
        return record["text_ids"][:1], record["text_ids"][1:]
    first = "learned_ids" if "learned_ids" in record else "prompt_ids"
    return record[first], record.get("completion_ids", [])
