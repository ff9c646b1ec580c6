"""Prompts, completions and conversations as token ids, by the tokenizer and its chat template."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.language.notices import notice
from datamodules.language.text import TAGS
from rl_modules.common.errors import UsageError
from rl_modules.language.tokenizer import tokenizer_to_dict

Messages = list[dict[str, Any]]
#: Characters that a message about unknown ones shows.
_SHOWN = 20
#: The tag at which a template begins to mark the assistant's text; transformers searches with the same expression.
_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


class TextEncoder:
    """Turns records into the tokens that a model reads.

    Args:
        tokenizer: the model's.
        chat_template: put prompts that are text into the tokenizer's chat template as a user message; None: where it
            has one. Prompts that are messages always go through it.
        system_prompt: first message of every conversation that has no system message of its own.
        chat_template_kwargs: variables of the chat template, such as ``{enable_thinking: false}``; a record's own
            column of that name wins.
    """

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

    # ---------------------------------------------------------------- prompts and completions

    def prompts(
        self, prompts: Sequence[str | Messages], records: Sequence[Mapping[str, Any]] | None = None
    ) -> list[list[int]]:
        """Encodes prompts up to the place where the model continues.

        Args:
            prompts: texts or chat messages. Where the last message is the assistant's, the model continues it (a
                prefill); otherwise the template opens the assistant's turn.
            records: the prompts' records, whose columns ``tools`` and ``chat_template_kwargs`` the template reads.

        Raises:
            UsageError: messages without a chat template, or a template that refuses them or has no place for tools;
                texts that are rendered already.
        """
        if not prompts:
            return []
        columns: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if records is None else records
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self._check_texts(texts)
        if not self.chats and len(texts) == len(prompts):
            return self._open(texts)
        ids: list[list[int]] = []
        for prompt, record in zip(prompts, columns, strict=True):
            if isinstance(prompt, str) and not self.chats:
                ids += self._open([prompt])
            else:
                ids += self._tokens([self._prompt_text(prompt, record)], add_special_tokens=False)
        return ids

    def completions(self, completions: Sequence[str]) -> list[list[int]]:
        """Token ids of completions, each with the EOS token that ends it; one that is written out counts.

        They are tokenized separately from their prompts, because generation also starts at this boundary.
        """
        if not completions:
            return []
        return [self._closed(ids) for ids in self._tokens(list(completions), False)]

    def text(self, text: str) -> list[int]:
        """Token ids of a whole text, with the tokenizer's own first token where it has one, and the EOS token."""
        return self._closed(self._tokens([text])[0])

    def messages(self, prompt: str | Messages) -> Messages:
        """Returns a prompt as the messages that the chat template gets, the system prompt included."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def as_read(self, prompt: str | Messages) -> str | Messages:
        """Returns a prompt as text, or as the messages for the chat template."""
        return prompt if isinstance(prompt, str) and not self.chats else self.messages(prompt)

    def ends_turns(self) -> bool:
        """Whether the chat template ends the assistant's turns with the EOS token, as :meth:`completions` does; true
        of a template that does not render a question and its answer alone.
        """
        asked = self.messages("?")
        try:
            ended = self._render([*asked, {"role": "assistant", "content": "!"}], {})
        except UsageError:
            return True
        return "!" not in ended or str(self.tokenizer.eos_token) in ended[ended.rindex("!") :]

    def unknown_end(self, stops: Collection[int]) -> str | None:
        """The special token with which the chat template ends the assistant's turns, where it ends no completion.

        Args:
            stops: token ids that end a completion.
        """
        try:
            ended = self._render([*self.messages("?"), {"role": "assistant", "content": "!"}], {})
        except UsageError:
            return None
        ids = self._tokens([ended.rpartition("!")[2]], False, note=False)[0] if "!" in ended else []
        added = self.tokenizer.added_tokens_decoder
        special = [added[token].content for token in ids if token in added and added[token].special]
        return special[0] if special and not set(ids) & set(stops) else None

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
        """Token ids of a whole conversation, and which of them the assistant wrote.

        The template's own ``{% generation %}`` blocks mark them. A template without them must render the beginning of a
        conversation equally with and without later messages. Each assistant turn is then the text that is added to the
        preceding messages with an opened assistant turn. An assistant message with ``weight: 0``, as OpenAI's format
        has it, does not count.

        Args:
            messages: of all turns.
            record: read for ``tools`` and ``chat_template_kwargs``.
            first: number of the message from which on assistant turns count.

        Raises:
            UsageError: no assistant turn counts, the template has neither, or a weight other than 0 and 1.
        """
        added = len(self.messages(messages)) - len(messages)
        messages, first = self.messages(messages), first + added
        answers = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
        counts = [_counts(messages[i]) for i in answers]
        if not any(counts):
            raise UsageError("a conversation has no assistant message to learn from; each needs at least one")
        if _GENERATION.search(str(self.tokenizer.chat_template)):
            return self._by_own_mask(messages, record, first, counts)
        return self._by_prefixes(messages, record, [i for i, flag in zip(answers, counts, strict=True) if flag])

    def _by_own_mask(
        self, messages: Messages, record: Mapping[str, Any], first: int, counts: Sequence[bool]
    ) -> tuple[list[int], list[bool]]:
        rendered = self._render(messages, record, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, written = list(rendered["input_ids"]), [bool(flag) for flag in rendered["assistant_masks"]]
        self._note_unknown([ids], [self._render(messages, record)])
        if first:  # what the template renders of the messages before does not count
            before = self._tokens([self._render(messages[:first], record)], False, note=False)[0]
            shared = common_length(before, ids)
            written[:shared] = [False] * shared
        if not any(written):
            raise UsageError("the chat template's {% generation %} blocks mark no token of an assistant message; mend "
                             "the template, or set completion_only_loss=false")  # fmt: skip
        if not all(counts):
            blocks = [list(places) for flag, places in groupby(range(len(ids)), written.__getitem__) if flag]
            if len(blocks) != len(counts):
                raise UsageError(f"the chat template marks {len(blocks)} passages of {len(counts)} assistant messages, "
                                 "so that those with weight 0 are not known; leave them out")  # fmt: skip
            for i in chain(*(places for places, flag in zip(blocks, counts, strict=True) if not flag)):
                written[i] = False
        return ids, written

    def _by_prefixes(
        self, messages: Messages, record: Mapping[str, Any], turns: Sequence[int]
    ) -> tuple[list[int], list[bool]]:
        whole = self._render(messages, record)
        ids = self._tokens([whole], False)[0]
        written = [False] * len(ids)
        for turn in turns:
            opened = self._render(messages[:turn], record, add_generation_prompt=True)
            closed = self._render(messages[: turn + 1], record)
            start, end = (self._tokens([text], False, note=False)[0] for text in (opened, closed))
            for text, beginning in ((opened, start), (closed, end)):
                if ids[: len(beginning)] != beginning:
                    raise UsageError(_why_no_beginning(turn, text, whole))
            written[len(start) : len(end)] = [True] * (len(end) - len(start))
        return ids, written

    def whole(self, messages: Messages, record: Mapping[str, Any]) -> list[int]:
        """Token ids of a whole conversation."""
        return self._tokens([self._render(self.messages(messages), record)], False)[0]

    # ---------------------------------------------------------------- the chat template

    def _prompt_text(self, prompt: str | Messages, record: Mapping[str, Any]) -> str:
        messages = self.messages(prompt)
        prefilled = messages[-1]["role"] == "assistant"
        return self._render(messages, record, add_generation_prompt=not prefilled, continue_final_message=prefilled)

    def _render(self, messages: Messages, record: Mapping[str, Any], **how: Any) -> Any:
        if self.tokenizer.chat_template is None:
            raise UsageError("the prompts are chat messages, but the tokenizer has no chat template; give prompts as "
                             "text, or another tokenizer")  # fmt: skip
        tools = tools_of(record)
        template = str(self.tokenizer.chat_template)
        for name, there in (("tools", tools), ("tool_calls", any(m.get("tool_calls") for m in messages))):
            if there and name not in template:
                raise UsageError(f"a record has {name}, which the tokenizer's chat template does not read; give a "
                                 f"tokenizer for tool calls, or leave out {name}")  # fmt: skip
        variables = {**self.chat_template_kwargs, **(record.get("chat_template_kwargs") or {})}

        def render(messages: Messages, **how: Any) -> Any:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **{"tokenize": False, **how, **variables})

        try:
            if (arguments := _texts_of_arguments(messages)) and _are_quoted(arguments, render, messages):
                messages = _with_read_arguments(messages)
            return render(messages, **how)
        except Exception as error:  # templates raise errors of their own, of jinja's and of Python's kinds
            if isinstance(error, UsageError):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"the chat template refuses a conversation with roles "
                             f"{', '.join(m['role'] for m in messages)} ({reason})") from error  # fmt: skip

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
        """Name the characters met since the last report that the tokenizer lacks; nothing where there are none.

        Args:
            source: where the texts come from.
        """
        new = list(self._unknown)[self._reported :]
        self._reported = len(self._unknown)
        if new:
            more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
            notice(f"{source}: the tokenizer lacks {' '.join(map(repr, new[:_SHOWN]))}{more}, which the model reads as "
                   f"{self.tokenizer.unk_token}; to keep them set model.tokenizer_name_or_path")  # fmt: skip


def reads_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two modules encode texts equally, by a datamodule's ``encoding`` of each; their tokenizers are
    separate objects.
    """
    tokenizers = one["tokenizer"], other["tokenizer"]
    alike = tokenizers[0] is tokenizers[1] or tokenizer_to_dict(tokenizers[0]) == tokenizer_to_dict(tokenizers[1])
    return alike and {**one, "tokenizer": None} == {**other, "tokenizer": None}


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """Returns a record's tools, a list of JSON schemas or the JSON text of one; None where it has none.

    Raises:
        UsageError: anything else.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UsageError(f"tools={tools[:60]!r} is not valid JSON, {error.msg}; give a list of schemas") from error
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f"tools is a {type(tools).__name__}, where a list of JSON schemas should be")
    return tools or None  # some templates open a section for an empty list


def _counts(message: Mapping[str, Any]) -> bool:
    """Returns whether an assistant message counts in the loss: its ``weight`` is not 0.

    Raises:
        UsageError: another weight than 0 and 1.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise UsageError(f"an assistant message has weight={weight!r}; give 1, or 0 for a message that is not learned")
    return bool(weight)


def _why_no_beginning(turn: int, text: str, whole: str) -> str:
    """Returns a sentence that says why a conversation's tokens do not begin with those of its beginning.

    Args:
        turn: number of the assistant's message.
        text: the beginning as the template renders it, before the message or with it.
        whole: the conversation as the template renders it.
    """
    if whole.startswith(text):
        return (f"the tokenizer joins {text[-1:]!r}, the last character of what the chat template renders up to "
                f"message {turn} of a conversation, with what follows, so that it is not known which tokens the "
                "assistant wrote; give a template whose generation prompt and turns do not end with it, or one with "
                "{% generation %} blocks, or set completion_only_loss=false to learn all tokens")  # fmt: skip
    return (f"the chat template renders message {turn} of a conversation differently when others follow, and has no "
            "{% generation %} blocks that mark what the assistant wrote; give a template with them, or set "
            "completion_only_loss=false to learn all tokens")  # fmt: skip


def _texts_of_arguments(messages: Messages) -> list[str]:
    """Returns the arguments of tool calls that are the JSON text of an object, the form of OpenAI's API."""
    calls = [call for m in messages for call in m.get("tool_calls") or () if isinstance(call, dict)]
    functions = [call.get("function", call) for call in calls]
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return [text for text in texts if isinstance(text, str) and _read_object(text) is not None]


def _are_quoted(arguments: Sequence[str], render: Callable[[Messages], str], messages: Messages) -> bool:
    """Whether a chat template wants arguments as objects: it writes their text as a string in quotes, or refuses it."""
    try:
        rendered = render(messages)
    except Exception:  # templates raise errors of their own, of jinja's and of Python's kinds
        return True
    quoted = [json.dumps(text, ensure_ascii=ascii_only) for text in arguments for ascii_only in (False, True)]
    return any(text in rendered for text in quoted)


def _with_read_arguments(messages: Messages) -> Messages:
    """Messages whose tool calls have objects as arguments."""

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = {name: read(item) if name == "function" else item for name, item in value.items()}
        found = _read_object(value["arguments"]) if isinstance(value.get("arguments"), str) else None
        return value if found is None else {**value, "arguments": found}

    return [{**m, "tool_calls": [read(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
            for m in messages]  # fmt: skip


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
