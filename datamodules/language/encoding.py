"""Prompts, completions and conversations as token ids, by the tokenizer and its chat template."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.language.notices import notice
from datamodules.language.sources import place_of
from datamodules.language.text import TAGS
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import tokenizer_to_dict

#: Characters that a message about unknown ones shows.
_SHOWN = 20
Messages = list[dict[str, Any]]


class TextEncoder:
    """Turns records into the tokens that a model reads; arguments as of the datamodules."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._is_asked_to_chat = chat_template is True
        #: Whether prompts that are text go through the chat template.
        self.chats = tokenizer.chat_template is not None if chat_template is None else chat_template
        self.system_prompt = system_prompt
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._unknown: dict[str, None] = {}
        self._reported = 0
        self.warned_of_cut = False

    # ---------------------------------------------------------------- prompts and completions

    def prompts(
        self, prompts: Sequence[str | Messages], records: Sequence[Mapping[str, Any]] | None = None
    ) -> list[list[int]]:
        """Token ids of texts or messages up to where the model continues: a prefill, or an opened assistant's turn."""
        if not prompts:
            return []
        columns: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if records is None else records
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self._check_texts(texts)
        if not self.chats and len(texts) == len(prompts):
            return self._open(texts)
        ids: list[list[int]] = []
        for i, (prompt, record) in enumerate(zip(prompts, columns, strict=True)):
            if self._is_plain(prompt):
                ids += self._open([str(prompt)])
                continue
            with _of_record(record, i):
                messages = self.messages(prompt)
                ids += self._tokens([self._opened(messages, record, _is_prefilled(messages))], False)
        return ids

    def answered(
        self,
        prompts: Sequence[str | Messages],
        *sides: Sequence[str | Messages],
        records: Sequence[Mapping[str, Any]] | None = None,
        complete: bool = True,
    ) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Token ids of prompts and of answers to them; ``complete`` refuses answers that the template renders in part.

        The template renders prompt and answer together, and the tokens are divided where they differ from the prompt
        with an opened turn. Without it answers are tokenized apart, as in generation, and end with the EOS token. A
        prompt's beginning is shared by its answers of all ``sides``.
        """
        from datamodules.language.chat_template import answer_start, refuse_loss

        columns: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if records is None else records
        # A text goes through the chat template with an answer that does.
        asked = [prompt if all(isinstance(answer, str) for answer in answers) else self.messages(prompt)
                 for prompt, *answers in zip(prompts, *sides, strict=True)]  # fmt: skip
        opened = self.prompts(asked, columns)
        starts = [len(ids) for ids in opened]
        wholes: list[list[list[int]]] = []
        for answers in sides:
            texts: list[str] = []
            for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
                if self._is_plain(prompt):
                    texts.append(str(answer))
                    continue
                with _of_record(columns[i], i):
                    talk = self._joined(prompt, answer)
                    texts.append(self._render(talk, columns[i]))
                    if complete:
                        refuse_loss(talk[-1], texts[-1])
            ids = self._tokens(texts, False) if texts else []
            for i, prompt in enumerate(asked):
                if self._is_plain(prompt):
                    ids[i] = [*opened[i], *self._closed(ids[i])]
                    continue
                with _of_record(columns[i], i):
                    before = self.messages(prompt)
                    start = answer_start(self, before, columns[i], opened[i], texts[i], ids[i], _is_prefilled(before))
                    starts[i] = min(starts[i], start)
            wholes.append(ids)
        cut = [[row[start:] for row, start in zip(ids, starts, strict=True)] for ids in wholes]
        return [ids[:start] for ids, start in zip(opened, starts, strict=True)], cut

    def _is_plain(self, prompt: str | Messages) -> bool:
        """Whether a prompt is a text that does not go through the chat template."""
        return not self.chats and isinstance(prompt, str)

    def unfinished(self, prompt: str | Messages, text: str) -> list[int]:
        """Token ids of a prompt and of the beginning of an answer to it."""
        if self._is_plain(prompt):
            return self._open([str(prompt)])[0] + self._tokens([text], False)[0]
        whole = self._render(self._joined(prompt, text), {}, continue_final_message=True)
        return self._tokens([whole], False)[0]

    def _joined(self, prompt: str | Messages, answer: str | Messages) -> Messages:
        """The conversation of a prompt and an answer, which continues a last message that is the assistant's."""
        messages = self.messages(prompt)
        if isinstance(answer, str):
            written = answer.removesuffix(str(self.tokenizer.eos_token))
            answer = [{"role": "assistant", "content": written}]
        if not _is_prefilled(messages):
            return [*messages, *answer]
        content = messages[-1]["content"] + answer[0]["content"]
        return [*messages[:-1], {**messages[-1], **answer[0], "content": content}, *answer[1:]]

    def text(self, text: str) -> list[int]:
        """Token ids of a whole text, with the tokenizer's own first token where it has one, and the EOS token."""
        return self._closed(self._tokens([text])[0])

    def messages(self, prompt: str | Messages) -> Messages:
        """A prompt as the messages that the chat template gets, the system prompt included."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def as_read(self, prompt: str | Messages) -> str | Messages:
        """A prompt as text, or as the messages for the chat template."""
        return prompt if self._is_plain(prompt) else self.messages(prompt)

    def ends_turns(self) -> bool:
        """Whether the chat template ends the assistant's turns with the EOS token; true where it renders none alone."""
        end = self._end()
        return end is None or str(self.tokenizer.eos_token) in end

    def after_eos(self) -> list[int]:
        """Token ids that the chat template writes after the EOS token of an assistant's turn."""
        _, _, rest = (self._end() or "").partition(str(self.tokenizer.eos_token))
        return self._tokens([rest], False, note=False)[0] if rest else []

    def unknown_end(self, stops: Collection[int]) -> str | None:
        """The special token with which the chat template ends turns, where it ends no completion, as ``stops`` do."""
        ids = self._tokens([self._end() or ""], False, note=False)[0]
        added = self.tokenizer.added_tokens_decoder
        special = [added[token].content for token in ids if token in added and added[token].special]
        return special[0] if special and not set(ids) & set(stops) else None

    def _end(self) -> str | None:
        """What the chat template writes after an answer; None where it does not render a question and its answer."""
        try:
            ended: str = self._render([*self.messages("?"), {"role": "assistant", "content": "!"}], {})
        except UsageError:
            return None
        return ended.rpartition("!")[2] if "!" in ended else None

    def hidden_tags(self) -> list[str]:
        """Tags of thoughts and answers that are special tokens, which the texts of completions leave out."""
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return [tag for tag in TAGS if tag in special]

    def _check_texts(self, texts: Sequence[str]) -> None:
        """Refuses prompts that are rendered already, and settings of the chat template that no text would meet."""
        if not texts:
            return
        if not self.chats and (self.system_prompt is not None or self.chat_template_kwargs):
            name = "system_prompt" if self.system_prompt is not None else "chat_template_kwargs"
            lacks = self.tokenizer.chat_template is None
            why = "the tokenizer has none" if lacks else "chat_template=false"
            raise UsageError(f"{name}={getattr(self, name)!r} is read by the chat template, through which prompts of "
                             f"text do not go ({why}); leave it out, or write it into the prompts")  # fmt: skip
        if not self.chats or self._is_asked_to_chat:
            return
        template = str(self.tokenizer.chat_template)
        # A tag such as <think>, which a prompt may speak of, is an added token as well, but no special one.
        marks = [token.content for token in self.tokenizer.added_tokens_decoder.values()
                 if token.special and token.content in template]  # fmt: skip
        if self.tokenizer.bos_token is not None and "bos_token" in template:
            marks.append(self.tokenizer.bos_token)  # which a template writes by that name
        for text in texts:
            if found := next((mark for mark in marks if mark in text), None):
                raise UsageError(f"the prompt {text[:40]!r} holds {found!r}, which the chat template writes: it was "
                                 "rendered already; set chat_template=false, or true to render it again")  # fmt: skip

    # ---------------------------------------------------------------- conversations

    def conversation(
        self, messages: Messages, record: Mapping[str, Any], first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which of them the assistant wrote, from message ``first`` on."""
        from datamodules.language.chat_template import conversation

        return conversation(self, messages, record, first)

    def whole(self, messages: Messages, record: Mapping[str, Any]) -> list[int]:
        """Token ids of a whole conversation."""
        return self._tokens([self._render(self.messages(messages), record)], False)[0]

    # ---------------------------------------------------------------- the chat template

    def _opened(self, messages: Messages, record: Mapping[str, Any], prefilled: bool) -> str:
        """Messages up to the place where the assistant's turn begins, or its unfinished last message continues."""
        how = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
        return str(self._render(messages, record, **how))

    def _render(self, messages: Messages, record: Mapping[str, Any], **how: Any) -> Any:
        from datamodules.language.chat_template import render  # only those who render need it

        return render(self.tokenizer, messages, record, self.chat_template_kwargs, **how)

    # ---------------------------------------------------------------- tokens

    def _open(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts that continue, without the EOS token that some tokenizers add."""
        eos, written = self.tokenizer.eos_token_id, str(self.tokenizer.eos_token)
        ids = self._tokens(texts)
        return [row[:-1] if row and row[-1] == eos and not text.endswith(written) else row
                for row, text in zip(ids, texts, strict=True)]  # fmt: skip

    def _closed(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def _tokens(self, texts: list[Any], add_special_tokens: bool = True, note: bool = True) -> list[list[int]]:
        ids = [list(row) for row in self.tokenizer(texts, add_special_tokens=add_special_tokens).input_ids]
        if add_special_tokens and (bos := self.tokenizer.bos_token):
            # Some tokenizers would add another BOS token before one that is written out.
            ids = [self._tokens([text], False, False)[0] if text.startswith(bos) else row
                   for row, text in zip(ids, texts, strict=True)]  # fmt: skip
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
            notice(f"{source}: the tokenizer lacks {' '.join(map(repr, new[:_SHOWN]))}{more}, which the model reads as "
                   f"{self.tokenizer.unk_token}; to keep them set model.tokenizer_name_or_path")  # fmt: skip


def reads_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two modules encode texts equally, by a datamodule's ``encoding`` of each."""
    tokenizers = one["tokenizer"], other["tokenizer"]
    alike = tokenizers[0] is tokenizers[1] or tokenizer_to_dict(tokenizers[0]) == tokenizer_to_dict(tokenizers[1])
    return alike and {**one, "tokenizer": None} == {**other, "tokenizer": None}


def _is_prefilled(messages: Messages) -> bool:
    """Whether the model continues the last message, which is the assistant's."""
    return bool(messages[-1]["role"] == "assistant")


@contextmanager
def _of_record(record: Mapping[str, Any], number: int) -> Iterator[None]:
    """Names a record in an error."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place_of(record, f'record {number}')}: {error}") from error
