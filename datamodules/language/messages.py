"""What environments, tools and models say, made plain: JSON's types and valid text, in objects of one's own.

Everything that an environment returns passes :func:`opening` or :func:`answer`. What can't be made plain is a
:class:`WrongAnswer`, which costs its dialogue.
"""

from collections.abc import Mapping
from typing import Any

#: A message as transformers' chat templates read it: ``role``, ``content``, of an assistant also ``tool_calls``.
Message = dict[str, Any]
#: Most characters of a message; a model with a context of a million tokens reads less.
MOST_CHARACTERS = 10_000_000
#: Largest sum of a dialogue's rewards, by magnitude: advantages square them in float32.
MOST_REWARD = 1e18
#: Most levels of a value; a checkpoint of one that is nested without end can't be written.
_DEEPEST = 100
_SHOWN = 60


class WrongAnswer(ValueError):
    """What an environment gave is no message, reward or end; the text continues "reset" or "step"."""


def plain(value: Any, depth: int = 0) -> Any:
    """Returns a copy of a value in JSON's types; numbers of NumPy and torch are such, and text is made valid."""
    if depth > _DEEPEST:
        raise WrongAnswer(f"gave a value that is nested more than {_DEEPEST} levels deep")
    if isinstance(value, str | bytes | bytearray):
        return valid_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(name): plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), depth + 1)
    raise WrongAnswer(f"gave {shown(value)}, where text, a number, a list or a dict should be")


def valid_text(text: str | bytes | bytearray) -> str:
    """Returns a text without halves of surrogate pairs, which no file can hold: two halves become their character, a
    single one and bytes that are no UTF-8 become U+FFFD.
    """
    if isinstance(text, bytes | bytearray):
        return bytes(text).decode("utf-8", "replace")
    return str.encode(text, "utf-16", "surrogatepass").decode("utf-16", "replace")


def shown(value: Any) -> str:
    """The beginning of a value for a message, whatever its own ``repr`` does."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def content_of(value: Any) -> str:
    """Returns a message's content as text: text, bytes, a number, or OpenAI's parts of text, which are joined."""
    if isinstance(value, list | tuple):
        return "".join(map(_part, value))
    if isinstance(value, str | bytes | bytearray):
        text = valid_text(value)
    elif isinstance(found := plain(value), bool | int | float):
        text = str(found)
    else:
        raise WrongAnswer(f"gave the content {shown(value)}, where text should be")
    if len(text) > MOST_CHARACTERS:
        raise WrongAnswer(f"gave a content of {len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
    return text


def _part(part: Any) -> str:
    """The text of a part, ``{"type": "text", "text": …}``; of the Responses API ``input_text`` and ``output_text``."""
    if isinstance(part, str):
        return content_of(part)
    text = part.get("text") if isinstance(part, Mapping) else None
    if isinstance(text, str) and str(part.get("type", "text")).endswith("text"):
        return content_of(text)
    raise WrongAnswer(f"gave a content with the part {shown(part)}, where text should be")


def messages(given: Any) -> list[Message]:
    """Returns copies of an environment's messages, with their ``content`` as text; other keys are kept.

    Raises:
        WrongAnswer: they are no list of messages of another role than assistant, or one has no content.
    """
    if not isinstance(given, list | tuple):
        raise WrongAnswer(f"gave {shown(given)}, where a list of messages should be")
    return [_message(message) for message in given]


def _message(given: Any) -> Message:
    role = given.get("role") if isinstance(given, Mapping) else None
    role = valid_text(role) if isinstance(role, str) else ""
    if role in ("", "assistant") or given.get("content") is None:
        raise WrongAnswer(
            f"gave {shown(given)}, where a message {{'role': …, 'content': …}} of another role than assistant should be"
        )
    others = {name: item for name, item in given.items() if name not in ("role", "content")}
    return {"role": role, "content": content_of(given["content"]), **plain(others)}


def opening(given: Any, tools: Any) -> tuple[list[Message], list[Any]]:
    """What ``reset`` returned, None for no messages, and the environment's tools as JSON schemas."""
    return [] if given is None else messages(given), plain(list(tools or ()))


def answer(given: Any) -> tuple[list[Message], float, bool]:
    """What ``step`` returned: new messages, a finite reward, and whether the dialogue is over."""
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise WrongAnswer(f"returned {shown(given)}, where (messages, reward, done) should be")
    said, reward, done = given
    earned, over = number(reward, "reward"), number(done, "done")
    if not abs(earned) <= MOST_REWARD:
        raise WrongAnswer(f"returned reward={shown(reward)}, where a number up to {MOST_REWARD:g} should be")
    if over not in (0.0, 1.0):
        raise WrongAnswer(f"returned done={shown(done)}, where true or false should be")
    return [] if said is None else messages(said), earned, bool(over)


def number(value: Any, name: str) -> float:
    """A number of Python, NumPy or torch as a float; text and None are none."""
    if not isinstance(value, str | bytes | bytearray) and hasattr(value, "__float__"):
        return float(value)
    raise WrongAnswer(f"returned {name}={shown(value)}, where a number should be")


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise WrongAnswer(f"gave the key {shown(name)}, where text should be")
    return valid_text(name)
