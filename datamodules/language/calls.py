"""Calls of tools in what a model wrote: one small parser per format, chosen by the tokenizer."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean

Message = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of a tool; ``error`` says to the model why it can't be read, and is "" where it can."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


def message_parser(tokenizer: Any, tools: Sequence[Any] | None = None) -> Callable[[str, str], Message]:
    """Returns a function ``(text, prompt) -> message`` for what a model wrote after a prompt, both with special tokens.

    It parses by the tokenizer's ``response_template`` and the ``tools``' schemas, else in its chat template's format.
    """
    if getattr(tokenizer, "response_template", None) is None:
        form, special = format_of(tokenizer), [token for token in tokenizer.all_special_tokens if token]
        return lambda text, prompt: message_of(text, form, special)

    def parse(text: str, prompt: str = "") -> Message:
        try:
            message = tokenizer.parse_response(text, prefix=prompt, tools=list(tools or []) or None)
        except Exception as error:  # the template's patterns may fail in many ways on what a model wrote
            said = f"{type(error).__name__}: {error}"
            return {"role": "assistant", "content": text, "tool_calls": [_as_dict(Call("", {}, said))]}
        return {"role": "assistant", "content": "", **message}

    return parse


def format_of(tokenizer: Any) -> str:
    """Returns the name of the format in ``FORMATS`` that a tokenizer's chat template writes; by default ``hermes``."""
    template = str(tokenizer.chat_template or "")
    default = "llama" if "<|start_header_id|>" in template else "hermes"  # Llama 3.2 has no mark of a call
    return next((name for name, (marker, _) in FORMATS.items() if marker in template), default)


def message_of(text: str, form: str | None = None, special: Sequence[str] = ()) -> Message:
    """Returns a text as a message with ``content``, and where there are any ``reasoning_content`` and ``tool_calls``.

    A call that can't be read has the key ``error``, a sentence for the model. ``form`` is a name in ``FORMATS``; None:
    the one whose marker stands in the text.
    """
    if form is not None and form not in FORMATS:
        raise UsageError(
            f"format {form!r} of tool calls must be one of {', '.join(FORMATS)}{did_you_mean(form, FORMATS)}"
        )
    while end := next((token for token in special if text.endswith(token)), None):
        text = text.removesuffix(end)
    thought, closed, rest = text.partition("</think>")
    if not closed:
        thought, rest = (text, "") if "<think>" in text else ("", text)
    form = form or next((name for name, (marker, _) in FORMATS.items() if marker in rest), "llama")
    content, calls = FORMATS[form][1](rest)
    if form == "harmony":
        thought = "\n".join(body for header, body in _channels(text) if "analysis" in header)
    for token in special:
        content, thought = content.replace(token, ""), thought.replace(token, "")
    message: Message = {"role": "assistant", "content": content.strip()}
    if thought := thought.replace("<think>", "").strip():
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [_as_dict(call) for call in calls]
    return message


def calls_of(message: Message) -> list[Call]:
    """Returns the calls of a message, which are read from its content where it has no ``tool_calls``."""
    found = message.get("tool_calls")
    if found is None:
        found = message_of(str(message.get("content") or "")).get("tool_calls", [])
    calls = []
    for item in found:
        item = item if isinstance(item, dict) else {}
        function = item.get("function", item)
        function = function if isinstance(function, dict) else {}
        read = _call(function.get("name"), function.get("arguments", {}))
        calls.append(replace(read, error=item.get("error") or read.error))
    return calls


def _as_dict(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", "function": function, **({"error": call.error} if call.error else {})}


# ---------------------------------------------------------------- formats


def _hermes(text: str) -> tuple[str, list[Call]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and others."""
    parts = re.split(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, flags=re.DOTALL)
    return "".join(parts[::2]), [_from_json(part) for part in parts[1::2]]


def _llama(text: str) -> tuple[str, list[Call]]:
    """``{"name": …, "parameters": {…}}`` as the whole text or after ``<|python_tag|>``, several apart by ``;``."""
    before, marked, after = text.partition("<|python_tag|>")
    body = re.sub(r"<\|(?:eom_id|eot_id)\|>\s*$", "", after if marked else text).strip()
    if not marked and not re.match(r'\{\s*"(name|type)"\s*:', body):
        return text, []
    objects: list[Any] = []
    end = 0
    while end < len(body):
        try:
            value, end = _DECODER.raw_decode(body, end)
        except (ValueError, RecursionError):
            return before if marked else "", [*map(_from_object, objects), _from_json(body[end:])]
        objects.append(value)
        end += len(body[end:]) - len(body[end:].lstrip("; \n\t"))
    return before if marked else "", [_from_object(value) for value in objects]


def _mistral(text: str) -> tuple[str, list[Call]]:
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}]``, or since 2025 ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in parts:
        name, named, arguments = part.partition("[ARGS]")
        if named:
            calls.append(_call(name.partition("[CALL_ID]")[0].strip(), arguments.strip()))
            continue
        value, error = _read(part.strip())
        listed = value if isinstance(value, list) else [value]
        calls += [Call("", {}, error)] if error else [_from_object(item) for item in listed]
    return content, calls


def _harmony(text: str) -> tuple[str, list[Call]]:
    """Gpt-oss: ``<|channel|>commentary to=functions.name<|message|>{…}<|call|>``; content is the final channel."""
    calls, content = [], ""
    for header, body in _channels(text):
        if name := re.search(r"to=functions\.([^\s<]+)", header):
            calls.append(_call(name[1], body))
        elif "analysis" not in header:
            content += body
    return content if "<|message|>" in text else text, calls


def _channels(text: str) -> list[tuple[str, str]]:
    """Header and body of each message of gpt-oss."""
    parts = [part.partition("<|message|>") for part in text.split("<|start|>")]
    return [(header, re.split(r"<\|(?:end|call|return)\|>", body)[0]) for header, _, body in parts]


def _deepseek(text: str) -> tuple[str, list[Call]]:
    """V3 and R1: ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and a block of JSON; V3.1: name and JSON alone."""
    content, _, rest = text.partition("<｜tool▁calls▁begin｜>")
    calls = []
    for part in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", rest, re.DOTALL):
        first, _, second = part.partition("<｜tool▁sep｜>")
        name, fence, block = second.partition("```json")
        calls.append(_call(*((name.strip(), block.strip().removesuffix("```")) if fence else (first.strip(), second))))
    return content, calls


#: Each format's marker, in chat templates and in texts, and its parser: text -> (content, calls).
FORMATS: dict[str, tuple[str, Callable[[str], tuple[str, list[Call]]]]] = {
    "hermes": ("<tool_call>", _hermes),
    "mistral": ("[TOOL_CALLS]", _mistral),
    "harmony": ("<|channel|>", _harmony),
    "deepseek": ("<｜tool▁calls▁begin｜>", _deepseek),
    "llama": ("<|python_tag|>", _llama),
}


# ---------------------------------------------------------------- JSON


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read(text: str) -> tuple[Any, str]:
    """A JSON text's value, or why it has none."""
    try:
        return _DECODER.decode(text.strip()), ""
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return None, f"the call {text.strip()[:80]!r} is no valid JSON: {said}"


def _from_json(text: str) -> Call:
    value, error = _read(text)
    return Call("", {}, error) if error else _from_object(value)


def _from_object(value: Any) -> Call:
    value = value.get("function", value) if isinstance(value, dict) and "name" not in value else value
    if not isinstance(value, dict):
        return Call("", {}, f"a call is an object with name and arguments, not {json.dumps(value)[:80]}")
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _call(name: Any, arguments: Any) -> Call:
    """A call of a name and arguments, an object or its JSON text: OpenAI's form."""
    if not isinstance(name, str) or not name:
        return Call("", {}, "the call has no name")
    if isinstance(arguments, str):
        arguments, error = _read(arguments or "{}")
        if error:
            return Call(name, {}, error)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Call(name, {}, f"the arguments of {name} must be an object, not {json.dumps(arguments)[:80]}")
    return Call(name, arguments)
