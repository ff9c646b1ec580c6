"""What a model wrote as an assistant's message: its thought, its answer, and its calls of tools."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from datamodules.language.call_forms import FORMS
from datamodules.language.calls import Call, call_in
from datamodules.language.messages import Message, valid_text
from rl_modules.common.errors import UsageError, did_you_mean

#: Marks of thoughts, answers and calls that a message may have; transformers' parser takes quadratic time in them.
_MOST_MARKS = 512
#: An id that every chat template takes; Mistral's refuse others.
_ID = re.compile(r"[A-Za-z0-9]{9}")


class MessageReader:
    """Reads texts in one form: a name in ``FORMS``, or a response template of transformers.

    ``special``: special tokens, which are left out of thoughts and answers. ``closing``: see the attribute.
    ``with_calls``: whether calls are read.
    """

    def __init__(
        self,
        form: str | Mapping[str, Any],
        special: Sequence[str] = (),
        closing: str = "",
        with_calls: bool = True,
    ) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        if isinstance(form, str) and form not in FORMS:
            raise UsageError(
                f"format {form!r} of tool calls must be one of {', '.join(FORMS)}{did_you_mean(form, FORMS)}"
            )
        self.form = FORMS[form] if isinstance(form, str) else None
        template: Mapping[str, Any] = form if isinstance(form, Mapping) else {"start_anchor_pattern": "(?!)"}
        if self.form is not None:
            template = {**template, "fields": self.form.fields(with_calls)}
        elif not with_calls:
            fields = {name: value for name, value in template["fields"].items() if name != "tool_calls"}
            template = {**template, "fields": fields}
        self.template = load_response_template(dict(template))
        marks = () if self.form is None else self.form.marks
        self.special = [token for token in (*special, *marks) if token]
        fields = template["fields"]
        thought = fields.get("reasoning_content", fields.get("thinking", {}))
        opening, close = thought.get("open"), thought.get("close")
        #: What begins a thought.
        self.opening = opening if isinstance(opening, str) else "<think>"
        close = close if isinstance(close, str) else "</think>"
        self._close = re.compile(thought.get("close_pattern") or re.escape(close))
        #: What the chat template writes between a thought and its answer.
        self.closing = closing or f"\n{close}\n\n"

    def opens_thought(self, prompt: str) -> bool:
        """Whether a prompt's end opens a thought."""
        return prompt.rstrip().endswith(self.opening.strip())

    def ends_in_thought(self, text: str, prompt: str = "") -> bool:
        """Whether a thought that a prompt's end or a text opens is not closed."""
        if self.opens_thought(prompt):
            text = self.opening + text
        last = text.rfind(self.opening)
        return last >= 0 and self._close.search(text, last) is None

    def read(
        self, text: str, prompt: str = "", end: str = "", tools: Sequence[Any] | None = None, first: int = 0
    ) -> Message:
        """Returns a message with ``content``, and where there are any ``reasoning_content`` and ``tool_calls``.

        Args:
            text: what the model wrote, with special tokens, without the stop token.
            prompt: what it had read before, or the end of that.
            end: the stop token, "" where the text is cut.
            tools: schemas of the tools, which say what arguments in tags are.
            first: number of the first call, of which ids are made.

        A call that can't be read has the key ``error``, a sentence for the model.
        """
        if self.opens_thought(prompt) and self._close.search(text) is None:
            return self._message("", text, [])
        try:
            found = self._parsed(text, prompt, end, tools)
            calls = self._calls(found, text)
        except Exception as error:  # a template's patterns and parsers may fail in many ways on what a model wrote
            said = " ".join(f"{type(error).__name__}: {error}".split())
            answer = re.split(self._close, text)[-1]
            return self._message(answer, "", [Call("", {}, valid_text(said)[:300])], first)
        thought = found.get("reasoning_content") or found.get("thinking") or ""
        answer = found.get("content") or ""
        if self.form is not None and self.form.answer:
            # What stands beside marked parts is the marks of their headers.
            answer = found.get("answer", "") if found.keys() - {"content"} else answer
        return self._message(str(answer), str(thought), calls, first)

    def _parsed(self, text: str, prompt: str, end: str, tools: Sequence[Any] | None) -> dict[str, Any]:
        from transformers.utils.chat_parsing import parse_response

        patterns = [x for field in self.template.fields.values() for x in (field.open_re, field.close_re) if x]
        if sum(m.end() > m.start() for x in patterns for m in islice(x.finditer(text), _MOST_MARKS)) >= _MOST_MARKS:
            raise ValueError(f"the message has more than {_MOST_MARKS} marks of thoughts and calls")
        closed = self._close.search(text)
        is_open = self.opens_thought(prompt)
        if self.form is not None and "close" in self.form.thought and closed is not None:
            # A thought that is closed and was not opened here was opened before.
            is_open |= self.opening not in text[: closed.start()]
        own = self.opening if is_open else ""
        prefix, text = (own, text) if self.form is not None else (prompt, text + end)
        found: dict[str, Any] = parse_response(text, self.template, prefix=prefix, tools=list(tools or []) or None)
        return found

    def _calls(self, found: Mapping[str, Any], text: str) -> list[Call]:
        form, calls = self.form, list[Call]()
        listed = found.get("tool_calls") or []
        for item in listed if isinstance(listed, list) else [listed]:
            if form is not None and isinstance(item, str):
                calls += form.calls(item)
            else:  # a field that is read once may hold several
                calls += map(call_in, item if isinstance(item, list) else [item])
        if form is not None and form.end:
            if calls and form.end not in text[text.rfind("<" + form.end[2:-1]) :]:
                calls[-1] = Call(calls[-1].name, {}, f"the call is cut off, it has no {form.end}")
            calls += [
                Call("", {}, f"the call {part.strip()[:80]!r} has not the form that the chat template shows")
                for part in found.get("wrong") or ()
            ]
        return calls

    def _message(self, answer: str, thought: str, calls: Sequence[Call], first: int = 0) -> Message:
        for token in self.special:
            answer, thought = answer.replace(token, ""), thought.replace(token, "")
        message: Message = {"role": "assistant", "content": valid_text(answer).strip()}
        if thought := valid_text(thought.replace(self.opening, "")).strip():
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {**call.as_dict(), "id": call.id if _ID.fullmatch(call.id) else f"call{(first + i) % 100_000:05d}"}
                for i, call in enumerate(calls)
            ]
        return message


def message_of(text: str, form: str = "hermes") -> Message:
    """Returns a text in a form of ``FORMS`` as an assistant's message; see :meth:`MessageReader.read`."""
    return MessageReader(form).read(text)
