"""Calls of tools: names, arguments and ids, made plain and checked where they are read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.language.messages import Message, valid_text

#: Levels of lists and objects that arguments may have.
_DEEPEST = 64


@dataclass(frozen=True)
class Call:
    """One call of a tool; ``error`` says to the model why it can't be read, and is "" where it can."""

    name: str
    arguments: dict[str, Any]
    error: str = ""
    id: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the call in OpenAI's form, with a key ``error`` where it can't be read."""
        function = {"name": self.name, "arguments": self.arguments}
        given = {**({"id": self.id} if self.id else {}), **({"error": self.error} if self.error else {})}
        return {"type": "function", "function": function, **given}


def calls_of(message: Mapping[str, Any]) -> list[Call]:
    """Returns the calls of a message's ``tool_calls``, in OpenAI's form; none where it has none."""
    return [call_in(item) for item in message.get("tool_calls") or ()]


def with_call_ids(message: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages that answer ``message``: tool messages without ``tool_call_id`` get those of its calls, in
    order.
    """
    ids = iter([call.id for call in calls_of(message)])
    copies = []
    for answer in answers:
        copy = dict(answer)
        if copy.get("role") == "tool" and (own := next(ids, "")):
            copy.setdefault("tool_call_id", own)
        copies.append(copy)
    return copies


# ---------------------------------------------------------------- JSON


def call_in(value: Any) -> Call:
    """The call of an object with ``name`` and ``arguments`` (or ``parameters``), or with these in its ``function``."""
    outer = value if isinstance(value, Mapping) else {}
    inner = outer.get("function", value) if "name" not in outer else value
    if not isinstance(inner, Mapping):
        return Call("", {}, f"a call is an object with name and arguments, not {_shown(inner)}")
    call = call_of(inner.get("name"), inner.get("arguments", inner.get("parameters", {})), outer.get("id"))
    error = outer.get("error")
    return Call(call.name, call.arguments, error, call.id) if isinstance(error, str) and error else call


def call_of(name: Any, arguments: Any, own_id: Any = "") -> Call:
    """The call of a name and arguments, an object or its JSON text."""
    own_id = own_id if isinstance(own_id, str) else ""
    if not isinstance(name, str) or not name:
        return Call("", {}, "the call has no name", own_id)
    name = valid_text(name)
    if isinstance(arguments, str):
        arguments, error = read_json(arguments or "{}")
        if error:
            return Call(name, {}, error, own_id)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        return Call(name, {}, f"the arguments of {name} must be an object, not {_shown(arguments)}", own_id)
    try:
        return Call(name, _plain(arguments), "", own_id)
    except ValueError as error:
        return Call(name, {}, f"the arguments of {name} can't be read: {error}", own_id)


def json_call(text: str) -> Call:
    """The call of a JSON object's text."""
    value, error = read_json(text)
    return Call("", {}, error) if error else call_in(value)


def read_json(text: str) -> tuple[Any, str]:
    """A JSON text's value, or why it has none."""
    try:
        return DECODER.decode(text.strip()), ""
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return None, f"the call {valid_text(text).strip()[:80]!r} is no valid JSON: {said}"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy of a JSON value with valid texts; refuses what JSON has not, and what is nested too deeply."""
    if depth > _DEEPEST:
        raise ValueError(f"they are nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        return {valid_text(str(key)): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise ValueError(f"{value} is no JSON")
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"a {type(value).__name__} is no JSON")


def _shown(value: Any) -> str:
    return valid_text(str(value))[:80]
