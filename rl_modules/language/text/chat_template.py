"""Conversations as tokens, by a tokenizer's chat template; which of them are an answer's."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.language.text.control_tokens import ControlTokens
from rl_modules.language.text.encoding import Messages, TextEncoder
from rl_modules.language.text.records import place_of
from rl_modules.language.text.rendering import render
from rl_modules.language.text.training_template import training_template

#: Characters that a message about a difference shows.
_SHOWN = 20
#: The tag at which a template begins to mark the assistant's text; transformers searches with the same expression.
_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


# ---------------------------------------------------------------- checks of what is rendered


def counts(message: Mapping[str, Any]) -> bool:
    """Whether an assistant message counts in the loss: its ``weight`` is not 0."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise UsageError(f"an assistant message has weight={weight!r}; give 1, or 0 for a message that is not learned")
    return bool(weight)


def refuse_loss(message: Mapping[str, Any], rendered: str) -> None:
    """Refuses an answer of which the chat template leaves something out; white space does not count."""
    squeezed = "".join(rendered.split())
    for name in ("content", "reasoning_content"):
        text = str(message.get(name) or "")
        if "".join(text.split()) not in squeezed:
            raise UsageError(
                f"the chat template leaves out the {name} {text[:40]!r} of an answer, or a part of it; "
                "leave it out of the records, or give a template that renders it"
            )


class Ambiguous(UsageError):
    """Raised if it is not known which tokens of a conversation the assistant wrote."""


def no_beginning(turn: int, text: str, whole: str) -> Ambiguous:
    """Says why the tokens of a conversation up to an assistant's message do not begin those of the ``whole``."""
    if whole.startswith(text):
        return Ambiguous(
            f"the tokenizer joins {text[-1:]!r}, the last character of what the chat template renders up to "
            f"message {turn} of a conversation, with what follows, so that it is not known which tokens the "
            "assistant wrote; give a template whose turns do not end with it, or one with {% generation %} blocks, "
            "or set completion_only_loss=false to learn all tokens"
        )
    return Ambiguous(
        f"the chat template renders message {turn} of a conversation differently when others follow, and has no "
        "{% generation %} blocks that mark what the assistant wrote; TRL's package has templates with them "
        "(chat_templates/*_training.jinja), of which the model's is taken by itself after `pip install trl`, or put "
        "one as chat_template.jinja into the tokenizer's folder, or set completion_only_loss=false to learn all tokens"
    )


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of leading tokens, or characters, that two sequences share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---------------------------------------------------------------- conversations as tokens


class ChatEncoder(TextEncoder):
    """Turns messages, and texts as those of a user, into the tokens that a chat template makes of them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None,
        chat_template_kwargs: dict[str, Any],
        chat_template: bool | None = None,
    ) -> None:
        super().__init__(tokenizer, system_prompt, chat_template_kwargs)
        self._is_asked_to_chat, self.chats = chat_template is True, chat_template is not False
        self.warned_of_cut = False
        self._control_tokens = ControlTokens(tokenizer)

    def prompts(
        self, prompts: Sequence[str | Messages], records: Sequence[Mapping[str, Any]] | None = None
    ) -> list[list[int]]:
        columns: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if records is None else records
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self._check_texts(texts)
        if not self.chats and len(texts) == len(prompts):
            return self._open(texts) if texts else []
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
        columns: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if records is None else records
        # A text goes through the chat template with an answer that does.
        asked = [
            prompt if all(isinstance(answer, str) for answer in answers) else self.messages(prompt)
            for prompt, *answers in zip(prompts, *sides, strict=True)
        ]
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
        if self._is_plain(prompt):
            return super().unfinished(prompt, text)
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

    def messages(self, prompt: str | Messages) -> Messages:
        """A prompt as the messages that the chat template gets, the system prompt included."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def as_read(self, prompt: str | Messages) -> str | Messages:
        return prompt if self._is_plain(prompt) else self.messages(prompt)

    def after_eos(self) -> list[int]:
        """Token ids that the chat template writes after the EOS token of an assistant's turn."""
        _, _, rest = (self._end() or "").partition(str(self.tokenizer.eos_token))
        return self._tokens([rest], False, note=False)[0] if rest else []

    def note_completions(self, source: str, stops: Collection[int]) -> None:
        """Reports an end of turn that ends no completion; ``stops`` do."""
        if self.chats and (end := self.unknown_end(stops)) is not None:
            known = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(list(stops))))
            notice(
                f"{source}: completions end with {known}, and not with {end!r}, with which the chat template ends "
                "the assistant's turns; set eos_token in tokenizer_config.json to it, or add its id to eos_token_id "
                "in generation_config.json"
            )

    def note_demonstrations(self, source: str) -> bool:
        """Reports a chat template that ends answers without the EOS token; returns whether it is one."""
        end = self._end() if self.chats else None
        if end is None or str(self.tokenizer.eos_token) in end:
            return False
        notice(
            f"{source}: the chat template ends the assistant's turns without the EOS token "
            f"{self.tokenizer.eos_token!r}, so that a model does not learn from them to end its completions with "
            "it; set eos_token in tokenizer_config.json to the template's end of a turn"
        )
        return True

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

    def _check_texts(self, texts: Sequence[str]) -> None:
        """Refuses prompts that are rendered already, too."""
        if not self.chats:
            super()._check_texts(texts)
        if not self.chats or self._is_asked_to_chat:
            return
        template = str(self.tokenizer.chat_template)
        # A tag such as <think>, which a prompt may speak of, is an added token as well, but no special one.
        marks = [
            token.content
            for token in self.tokenizer.added_tokens_decoder.values()
            if token.special and token.content in template
        ]
        if self.tokenizer.bos_token is not None and "bos_token" in template:
            marks.append(self.tokenizer.bos_token)  # which a template writes by that name
        for text in texts:
            if found := next((mark for mark in marks if mark in text), None):
                raise UsageError(
                    f"the prompt {text[:40]!r} holds {found!r}, which the chat template writes: it was "
                    "rendered already; set chat_template=false, or true to render it again"
                )

    def conversation(
        self, messages: Messages, record: Mapping[str, Any], first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which of them the assistant wrote, from message ``first`` on.

        The template's ``{% generation %}`` blocks mark them. Without blocks an assistant's turn is what is added to the
        messages before it with an opened turn; where that is ambiguous, TRL's training template has blocks. A message
        with ``weight: 0``, as OpenAI's format has it, does not count.
        """
        added = len(self.messages(messages)) - len(messages)
        messages, first = self.messages(messages), first + added
        answers = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
        flags = [counts(messages[i]) for i in answers]
        if not any(flags):
            raise UsageError("a conversation has no assistant message to learn from; each needs at least one")
        if _GENERATION.search(str(self.tokenizer.chat_template)):
            return _by_own_mask(self, messages, record, first, flags)
        try:
            return _by_prefixes(self, messages, record, [i for i, flag in zip(answers, flags, strict=True) if flag])
        except Ambiguous:
            if self._blocks is None:
                raise
            return _by_own_mask(self, messages, record, first, flags, self._blocks)

    @cached_property
    def _blocks(self) -> str | None:
        """The training variant of the chat template, for conversations whose turns it does not tell apart."""
        name, template = training_template(str(self.tokenizer.chat_template)) or ("", None)
        if template is not None:
            notice(
                f"conversations whose messages the chat template renders differently when others follow are rendered "
                f"with TRL's {name}, whose {{% generation %}} blocks mark what the assistant wrote"
            )
        return template

    def whole(self, messages: Messages, record: Mapping[str, Any]) -> list[int]:
        """Token ids of a whole conversation."""
        return self._tokens([self._render(self.messages(messages), record)], False)[0]

    def as_text(self, messages: Messages) -> Messages:
        """Messages of others whose control tokens are to be encoded as text; only this encoder reads them."""
        marked: Messages = self._control_tokens.marked(messages)
        return marked

    def continued(self, text: str, note: bool = False) -> list[int]:
        """Token ids of a text that continues another one: some tokenizers add a space where a text begins."""
        if self._control_tokens.are_marked_in(text):
            return [i for piece in self._control_tokens.pieces(text) for i in self.continued(piece, note)]
        anchor, whole = super()._tokens(["!", "!" + text], False, note=False)
        if whole[: len(anchor)] == anchor:
            return whole[len(anchor) :]
        return super()._tokens([text], False, note)[0]

    def _tokens(self, texts: list[Any], add_special_tokens: bool = True, note: bool = True) -> list[list[int]]:
        if not any(map(self._control_tokens.are_marked_in, texts)):
            return super()._tokens(texts, add_special_tokens, note)
        rows = []
        for text in texts:
            first, *others = self._control_tokens.pieces(text)
            ids = super()._tokens([first], add_special_tokens, note)[0]
            rows.append(ids + [i for piece in others for i in self.continued(piece, note)])
        return rows

    def _opened(self, messages: Messages, record: Mapping[str, Any], prefilled: bool) -> str:
        """Messages up to the place where the assistant's turn begins, or its unfinished last message continues."""
        how: dict[str, Any] = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
        return str(self._render(messages, record, **how))

    def _render(self, messages: Messages, record: Mapping[str, Any], template: str | None = None, **how: Any) -> Any:
        other = {} if template is None else {"chat_template": template}
        return render(self.tokenizer, messages, record, self.chat_template_kwargs | other, **how)


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


def answer_start(
    encoder: Any,
    before: Messages,
    record: Mapping[str, Any],
    opened: list[int],
    text: str,
    ids: list[int],
    prefilled: bool,
) -> int:
    """Number of an answer's first token: where a conversation (``text``, ``ids``) differs from the ``opened`` one."""
    start = common_length(opened, ids)
    if start == len(opened) < len(ids):
        return start
    asked = encoder._opened(before, record, prefilled)
    needed = len(asked) if prefilled else common_length(asked, encoder._render(before, record))
    shared = common_length(asked, text)
    if shared < needed or start == len(ids):
        raise Ambiguous(
            "the chat template renders the messages before an answer differently when it follows "
            f"({asked[shared:][:_SHOWN]!r} becomes {text[shared:][:_SHOWN]!r}), so that it is not "
            "known where the answer begins; give another template, or for SFT one with {% generation "
            "%} blocks or completion_only_loss=false"
        )
    if not encoder.warned_of_cut:
        encoder.warned_of_cut = True
        notice(
            f"the chat template opens an answer with {encoder.tokenizer.decode(opened[start:])!r}, which a "
            "conversation with the answer does not have, or joins with what follows: the answers to learn begin "
            "before it, completions are written after it"
        )
    return start


def _by_own_mask(
    encoder: Any,
    messages: Messages,
    record: Mapping[str, Any],
    first: int,
    flags: Sequence[bool],
    template: str | None = None,
) -> tuple[list[int], list[bool]]:
    rendered = encoder._render(
        messages, record, template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, written = list(rendered["input_ids"]), [bool(flag) for flag in rendered["assistant_masks"]]
    text = encoder._render(messages, record, template)
    encoder._note_unknown([ids], [text])
    if messages[-1]["role"] == "assistant":
        refuse_loss(messages[-1], text)
    if first:  # what the template renders of the messages before does not count
        before = encoder._tokens([encoder._render(messages[:first], record, template)], False, note=False)[0]
        shared = common_length(before, ids)
        written[:shared] = [False] * shared
    if not any(written):
        raise UsageError(
            "the chat template's {% generation %} blocks mark no token of an assistant message; mend "
            "the template, or set completion_only_loss=false"
        )
    if not all(flags):
        blocks = [list(places) for flag, places in groupby(range(len(ids)), written.__getitem__) if flag]
        if len(blocks) != len(flags):
            raise UsageError(
                f"the chat template marks {len(blocks)} passages of {len(flags)} assistant messages, "
                "so that those with weight 0 are not known; leave them out"
            )
        for i in chain(*(places for places, flag in zip(blocks, flags, strict=True) if not flag)):
            written[i] = False
    return ids, written


def _by_prefixes(
    encoder: Any, messages: Messages, record: Mapping[str, Any], turns: Sequence[int]
) -> tuple[list[int], list[bool]]:
    whole = encoder._render(messages, record)
    ids = encoder._tokens([whole], False)[0]
    written = [False] * len(ids)
    for turn in turns:
        before = messages[:turn]
        opened = encoder._tokens([encoder._opened(before, record, False)], False, note=False)[0]
        start, end = answer_start(encoder, before, record, opened, whole, ids, False), len(ids)
        if turn + 1 < len(messages):
            closed = encoder._render(messages[: turn + 1], record)
            if not whole.startswith(closed):  # Phi's templates end a conversation, not a turn, with the EOS token
                closed = closed.removesuffix(str(encoder.tokenizer.eos_token))
            beginning = encoder._tokens([closed], False, note=False)[0]
            end = len(beginning)
            if ids[:end] != beginning:
                raise no_beginning(turn, closed, whole)
        refuse_loss(messages[turn], whole)
        written[start:end] = [True] * (end - start)
    return ids, written


def encoder_of(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: bool | None = None,
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> "TextEncoder":
    """Returns the encoder of a tokenizer's texts and, if it has a chat template, of messages; arguments as of the
    datamodules.
    """
    settings = dict(chat_template_kwargs or {})
    if tokenizer.chat_template is not None or chat_template:
        return ChatEncoder(tokenizer, system_prompt, settings, chat_template)
    return TextEncoder(tokenizer, system_prompt, settings)
