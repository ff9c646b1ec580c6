"""What a tokenizer's chat template makes of messages, within bounded time."""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rl_modules.common.errors import UsageError, naming
from rl_modules.language.text.encoding import Messages
from rl_modules.language.text.template_trial import LIMIT_MB, LIMIT_S, is_bounded

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
    name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"

    def apply(messages: Messages, **how: Any) -> Any:
        how = {"tokenize": False, "add_generation_prompt": False, "continue_final_message": False, **how}
        with _time_limit(name):
            return tokenizer.apply_chat_template(messages, tools=tools, **how, **variables)

    try:
        own = tokenizer.get_chat_template(variables.get("chat_template"), tools)
        if not is_bounded(own, {**tokenizer.special_tokens_map, **variables}):
            raise UsageError(
                f"{name} takes more than {LIMIT_S} s of processor time or {LIMIT_MB} MiB of memory for a short "
                "conversation; give another template"
            )
        return apply(_with_arguments(messages, template, apply), **how)
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
        with naming(f"tools={tools[:60]!r}", RecursionError):
            tools = json.loads(tools)
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


#: Whether a chat template takes arguments of calls as objects, and as JSON texts.
_TAKES: dict[str, tuple[bool, bool]] = {}


def _with_arguments(messages: Messages, template: str, render: Callable[[Messages], str]) -> Messages:
    """Messages whose calls have arguments as the chat template takes them: objects, or JSON texts as OpenAI's."""
    if not any(m.get("tool_calls") for m in messages):
        return messages
    if template not in _TAKES and any(found := _takes(messages, render)):
        _TAKES[template] = found
    takes_objects, takes_texts = _TAKES.get(template, (True, True))

    def as_taken(given: Any) -> Any:
        if isinstance(given, dict) and not takes_objects:
            return json.dumps(given, ensure_ascii=False)
        if isinstance(given, str) and not takes_texts:
            try:
                found = json.loads(given)
            except (ValueError, RecursionError):
                return given
            return found if isinstance(found, dict) else given
        return given

    return _with_each(messages, as_taken)


def _with_each(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    """Messages with the arguments of each call changed."""

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = {name: changed(item) if name == "function" else item for name, item in value.items()}
        return {**value, "arguments": change(value["arguments"])} if "arguments" in value else value

    return [{**m, "tool_calls": list(map(changed, m["tool_calls"]))} if m.get("tool_calls") else m for m in messages]


def _takes(messages: Messages, render: Callable[[Messages], str]) -> tuple[bool, bool]:
    """Whether a chat template writes arguments that are objects as JSON, and JSON texts without quotes around them."""
    value = {"a": "b c"}

    def writes(given: Any, wrong: str) -> bool:
        try:
            return wrong not in render(_with_each(messages, lambda _: given))
        except Exception:  # templates raise errors of their own, of jinja's and of Python's kinds
            return False

    return writes(value, str(value)), writes(json.dumps(value), json.dumps(json.dumps(value)))
