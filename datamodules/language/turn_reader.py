"""How what a model writes is read under a tokenizer's chat template: found by trying it, before anything is written."""

from collections.abc import Collection, Mapping
from typing import Any

from datamodules.language.call_forms import FORMS
from datamodules.language.calls import calls_of
from datamodules.language.message_reader import MessageReader
from datamodules.language.messages import Message
from rl_modules.common.errors import UsageError
from rl_modules.language.text.chat_template import ChatEncoder, common_length

_THOUGHT, _ANSWER, _RESULT = "Th0ught", "Answ3r", "18 degr33s"
_CITY = "Zurich"
_ARGUMENTS = {"city": _CITY, "days": 3}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "get_weather", "arguments": _ARGUMENTS}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["city", "days"],
        },
    },
}
_SHOWN = 60


class TurnReaders:
    """Readers of what a model writes, one for each kind of records.

    Without tools there is one where the chat template marks thoughts; elsewhere a text is the message as it stands.
    """

    def __init__(self, encoder: ChatEncoder, stops: Collection[int]) -> None:
        self._encoder, self._stops = encoder, stops
        self._readers: dict[str, MessageReader | None] = {}

    def of(self, record: Mapping[str, Any]) -> MessageReader | None:
        """The reader of what is written after a record's prompt.

        Raises:
            UsageError: the chat template does not render calls or their answers, or no form reads them.
        """
        key = repr((bool(record.get("tools")), record.get("chat_template_kwargs")))
        if key not in self._readers:
            settings = {"chat_template_kwargs": record.get("chat_template_kwargs")}
            probe = _Probe(self._encoder, self._stops, settings)
            self._readers[key] = probe.reader_of_calls() if record.get("tools") else probe.reader_of_thoughts()
        return self._readers[key]


class _Probe:
    """A thought and an answer, a call and its result, rendered by a chat template."""

    def __init__(self, encoder: ChatEncoder, stops: Collection[int], settings: dict[str, Any]) -> None:
        self._stops = [str(token) for token in encoder.tokenizer.convert_ids_to_tokens(sorted(stops))]
        self._encoder, self._asked = encoder, encoder.messages("?")
        self._plain, self._with_tools = settings, {**settings, "tools": [_TOOL]}
        self._special = [t.content for t in encoder.tokenizer.added_tokens_decoder.values() if t.special]
        own = getattr(encoder.tokenizer, "response_template", None)
        self._own, self._template = own, str(encoder.tokenizer.chat_template)
        self._forms: list[Any] = list(FORMS) if own is None else [own]
        said = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        self._thought = self._closing = ""
        try:
            self._prompt, self._thought = self._written(said, self._plain)
        except UsageError:  # a template that renders no thoughts may refuse them
            return
        if _THOUGHT in self._thought:
            self._closing = self._thought.partition(_THOUGHT)[2].partition(_ANSWER)[0]

    def reader_of_thoughts(self) -> MessageReader | None:
        """The reader of thoughts and answers; None where the template marks no thoughts."""
        readers = [MessageReader(form, self._special, self._closing, with_calls=False) for form in self._forms]
        return next(filter(self._reads_thoughts, readers), None)

    def reader_of_calls(self) -> MessageReader:
        """The reader of calls, preferably one that reads thoughts, too."""
        prompt, text = self._written({"role": "assistant", "content": "", "tool_calls": [_CALL]}, self._with_tools)
        answered = self._answered()
        readers = [MessageReader(form, self._special, self._closing) for form in self._forms]
        fitting = [one for one in readers if answered is not None and self._reads_call(one, text, prompt, answered)]
        if not fitting:
            reads = "no known form reads" if self._own is None else "the tokenizer's response_template does not read"
            said = f"writes a call of a tool as {text.strip()[:_SHOWN]!r}, which {reads}"
            said = "leaves out what a tool answers" if answered is None else said
            raise UsageError(
                f"environment: the chat template {said}; give the tokenizer another chat template, or a "
                "response_template (in tokenizer_config.json) that reads it"
            )
        return next(filter(self._reads_thoughts, fitting), fitting[0])

    def _answered(self) -> str | None:
        """What the template writes after the call's result; None where it leaves it out."""
        result = {"role": "tool", "name": "get_weather", "tool_call_id": _CALL["id"], "content": _RESULT}
        talk = [*self._asked, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, result]
        whole = str(self._encoder._render(talk, self._with_tools, add_generation_prompt=True))
        return whole.rpartition(_RESULT)[2] if _RESULT in whole else None

    def _written(self, message: Message, record: Mapping[str, Any]) -> tuple[str, str]:
        """The prompt, and what a model would write for a message: what the template adds to the prompt."""
        prompt = self._encoder._opened(self._asked, record, False)
        whole = str(self._encoder._render([*self._asked, message], record))
        return prompt, whole[common_length(prompt, whole) :]

    def _reads_thoughts(self, reader: MessageReader) -> bool:
        text = self._thought
        if _THOUGHT not in text:  # the template leaves thoughts out of what it renders, or marks none
            begin = "" if reader.opens_thought(self._prompt) else reader.opening
            if begin.strip() not in self._template:
                return False
            text = f"{begin}{_THOUGHT}{reader.closing}{text}"
        read = reader.read(text, self._prompt)
        return (read["content"], read.get("reasoning_content")) == (_ANSWER, _THOUGHT)

    def _reads_call(self, reader: MessageReader, text: str, *prompts: str) -> bool:
        """Whether a reader finds the call in its rendering, after a question and after a tool's answer."""
        if reader.opens_thought(prompts[0]) and reader.ends_in_thought(text, prompts[0]):
            text = f"{reader.closing}{text}"  # a template that opens thoughts may leave them out of what it renders
        begin, city, rest = text.rpartition(_CITY)
        place, end = min([(rest.index(stop), stop) for stop in self._stops if stop in rest], default=(len(rest), ""))
        for prompt in prompts:
            calls = calls_of(reader.read(begin + city + rest[:place], prompt, end, [_TOOL]))
            if [(call.name, call.arguments, call.error) for call in calls] != [("get_weather", _ARGUMENTS, "")]:
                return False
        return True
