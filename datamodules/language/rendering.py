"""What a tokenizer's chat template makes of messages, within bounded time."""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from datamodules.language.encoding import Messages
from rl_modules.common.errors import UsageError

#: Processor time that a chat template may take for one conversation; usual ones take a millisecond.
TEMPLATE_LIMIT_S = 5.0


def render(
    tokenizer: Any, messages: Messages, record: Mapping[str, Any], settings: Mapping[str, Any], **how: Any
) -> Any:
    """What a chat template makes of messages with ``settings``, a record's ``tools`` and its own settings."""
    tools = tools_of(record)
    template = str(tokenizer.chat_template)
    for name, there in (("tools", tools), ("tool_calls", any(m.get("tool_calls") for m in messages))):
        if there and name not in template:
            raise UsageError(
                f"a record has {name}, which the tokenizer's chat template does not read; give a "
                f"tokenizer for tool calls, or leave out {name}"
            )
    variables = {**settings, **(record.get("chat_template_kwargs") or {})}

    def apply(messages: Messages, **how: Any) -> Any:
        with _time_limit(f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"):
            how = {"tokenize": False, "add_generation_prompt": False, "continue_final_message": False, **how}
            return tokenizer.apply_chat_template(messages, tools=tools, **how, **variables)

    try:
        read, texts = _read_arguments(messages)
        return apply(read if texts and _are_quoted(texts, apply, messages) else messages, **how)
    except Exception as error:  # templates raise errors of their own, of jinja's and of Python's kinds
        if isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"the chat template refuses a conversation with roles {', '.join(m['role'] for m in messages)} ({reason})"
        ) from error


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """A record's tools, a list of JSON schemas or the JSON text of one; None where it has none."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"tools={tools[:60]!r} is not valid JSON, {error}; give a list of schemas") from error
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f"tools is a {type(tools).__name__}, where a list of JSON schemas should be")
    return tools or None  # some templates open a section for an empty list


@contextmanager
def _time_limit(what: str) -> Iterator[None]:
    """Ends Python code that takes too much processor time with an error; only in the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise UsageError(
            f"{what} takes more than {TEMPLATE_LIMIT_S:g} s of processor time for one conversation, as a "
            "loop without an end does; give another template"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _read_arguments(messages: Messages) -> tuple[Messages, list[str]]:
    """Messages whose tool calls have objects as arguments, and the JSON texts that these were: OpenAI's form."""
    texts: list[str] = []

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = {name: read(item) if name == "function" else item for name, item in value.items()}
        text = value.get("arguments")
        try:
            found = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            return value
        texts.append(text)
        return {**value, "arguments": found}

    return [
        {**m, "tool_calls": [read(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages
    ], texts


def _are_quoted(arguments: Sequence[str], render: Callable[[Messages], str], messages: Messages) -> bool:
    """Whether a chat template wants arguments as objects: it writes their text as a string in quotes, or refuses it."""
    try:
        rendered = render(messages)
    except Exception:  # templates raise errors of their own, of jinja's and of Python's kinds
        return True
    quoted = [json.dumps(text, ensure_ascii=ascii_only) for text in arguments for ascii_only in (False, True)]
    return any(text in rendered for text in quoted)
