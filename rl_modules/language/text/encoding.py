"""Prompts and completions as token ids; the texts alone, for those whose tokenizer has no chat template."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.language.text.records import place_of
from rl_modules.language.tokenizer import tokenizer_to_dict

#: Characters that a message about unknown ones shows.
_SHOWN = 20
Messages = list[dict[str, Any]]


class TextEncoder:
    """Turns texts into the tokens that a model reads."""

    #: Whether prompts that are text go through the chat template.
    chats = False
    #: Whether messages may have images.
    reads_images = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, chat_template_kwargs: dict[str, Any]
    ) -> None:
        self.tokenizer, self.system_prompt, self.chat_template_kwargs = tokenizer, system_prompt, chat_template_kwargs
        self._unknown: dict[str, None] = {}
        self._reported = 0

    def prompts(
        self, prompts: Sequence[str | Messages], records: Sequence[Mapping[str, Any]] | None = None
    ) -> list[list[int]]:
        """Token ids of texts or messages up to where the model continues: a prefill, or an opened assistant's turn."""
        texts = _texts(prompts, records)
        self._check_texts(texts)
        return self._open(texts) if texts else []

    def answered(
        self,
        prompts: Sequence[str | Messages],
        *sides: Sequence[str | Messages],
        records: Sequence[Mapping[str, Any]] | None = None,
        complete: bool = True,
    ) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Token ids of prompts and of answers to them; ``complete`` refuses answers that the template renders in part.

        Answers are tokenized apart, as in generation, and end with the EOS token. The template renders prompt and
        answer together, and the tokens are divided where they differ from the prompt with an opened turn. A prompt's
        beginning is shared by its answers of all ``sides``.
        """
        opened = self.prompts(prompts, records)
        tokens = [self._tokens(_texts(answers, records), False) if answers else [] for answers in sides]
        return opened, [[self._closed(ids) for ids in side] for side in tokens]

    def unfinished(self, prompt: str | Messages, text: str) -> list[int]:
        """Token ids of a prompt and of the beginning of an answer to it."""
        return self._open([str(prompt)])[0] + self._tokens([text], False)[0]

    def text(self, text: str) -> list[int]:
        """Token ids of a whole text, with the tokenizer's own first token where it has one, and the EOS token."""
        return self._closed(self._tokens([text])[0])

    def as_read(self, prompt: str | Messages) -> str | Messages:
        """A prompt as text, or as the messages for the chat template."""
        return prompt

    def note_completions(self, source: str, stops: Collection[int]) -> None:
        """Reports that completions end otherwise than a chat template writes; without one, nothing."""

    def note_left_out(self, source: str, completions: Sequence[Sequence[int]]) -> bool:
        """Reports special tokens within completions, which their texts leave out; returns whether there are any."""
        named = {self.tokenizer.pad_token_id, self.tokenizer.unk_token_id, self.tokenizer.bos_token_id}
        added = self.tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special} - named - {self.tokenizer.eos_token_id}
        found = {i for row in completions for i in row[:-1] if i in special} if special else set()
        if found:
            notice(
                f"{source}: completions have the special tokens {', '.join(added[i].content for i in sorted(found))}, "
                "which the texts that reward functions and tables read leave out; read completion_ids, or add them "
                "as tokens that are not special"
            )
        return bool(found)

    def _check_texts(self, texts: Sequence[str]) -> None:
        """Refuses settings of the chat template that no text would meet."""
        if texts and (self.system_prompt is not None or self.chat_template_kwargs):
            name = "system_prompt" if self.system_prompt is not None else "chat_template_kwargs"
            why = "the tokenizer has none" if self.tokenizer.chat_template is None else "chat_template=false"
            raise UsageError(
                f"{name}={getattr(self, name)!r} is read by the chat template, through which prompts of "
                f"text do not go ({why}); leave it out, or write it into the prompts"
            )

    def _open(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts that continue, without the EOS token that some tokenizers add."""
        eos, written = self.tokenizer.eos_token_id, str(self.tokenizer.eos_token)
        ids = self._tokens(texts)
        return [
            row[:-1] if row and row[-1] == eos and not text.endswith(written) else row
            for row, text in zip(ids, texts, strict=True)
        ]

    def _closed(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def _tokens(self, texts: list[Any], add_special_tokens: bool = True, note: bool = True) -> list[list[int]]:
        ids = [list(row) for row in self.tokenizer(texts, add_special_tokens=add_special_tokens).input_ids]
        if add_special_tokens and (bos := self.tokenizer.bos_token):
            # Some tokenizers would add another BOS token before one that is written out.
            ids = [
                self._tokens([text], False, False)[0] if text.startswith(bos) else row
                for row, text in zip(ids, texts, strict=True)
            ]
        if note:
            self._note_unknown(ids, texts)
        return ids

    def _note_unknown(self, ids: list[list[int]], texts: list[str]) -> None:
        unknown = self.tokenizer.unk_token_id
        if unknown is None:
            return
        for row, text in zip(ids, texts, strict=True):
            if unknown in row:
                lacking = self._unknown_pieces(dict.fromkeys(text), unknown)
                # A tokenizer of words may know every character of an unknown word.
                self._unknown |= dict.fromkeys(lacking or self._unknown_pieces(dict.fromkeys(text.split()), unknown))

    def _unknown_pieces(self, pieces: Iterable[str], unknown: int) -> list[str]:
        return [
            piece for piece in pieces if piece in self._unknown or unknown in self._tokens([piece], False, False)[0]
        ]

    def report_unknown(self, source: str) -> None:
        """Names the characters met since the last report that the tokenizer lacks, if there are any."""
        new = list(self._unknown)[self._reported :]
        self._reported = len(self._unknown)
        if new:
            more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
            notice(
                f"{source}: the tokenizer lacks {' '.join(map(repr, new[:_SHOWN]))}{more}, which the model reads as "
                f"{self.tokenizer.unk_token}; to keep them set model.tokenizer_name_or_path"
            )


def _texts(values: Sequence[str | Messages], records: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The same values; refuses messages, which only a chat template makes texts of."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            place = place_of({} if records is None else records[i], f"record {i}")
            raise UsageError(
                f"{place}: the prompts or answers are chat messages, but the tokenizer has no chat "
                "template; give texts, or another tokenizer"
            )
    return list(map(str, values))


def reads_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two modules encode texts equally, by a datamodule's ``encoding`` of each."""
    tokenizers = one["tokenizer"], other["tokenizer"]
    alike = tokenizers[0] is tokenizers[1] or tokenizer_to_dict(tokenizers[0]) == tokenizer_to_dict(tokenizers[1])
    return alike and {**one, "tokenizer": None} == {**other, "tokenizer": None}
