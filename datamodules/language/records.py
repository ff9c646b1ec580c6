"""Conversion of a file's or dataset's row to a record, with checks."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datamodules.language.tasks.base import Record, fill
from rl_modules.common.errors import UsageError, did_you_mean

#: Columns that must be text where they occur, unless the caller names others; numbers become text.
TEXTS = ("answer", "completion", "chosen", "rejected")


class NothingUsable(UsageError):
    """Raised if all records of a source or of a stream's block are left out; a stream then reads its next block."""


class PlacedRecord(dict[str, Any]):
    """A record with its file and line, for errors that are found during tokenization; copies are plain dicts.

    Args:
        record: its columns.
        place: its file and line, or dataset and row.
    """

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(record)
        self.place = place


def place_of(record: Mapping[str, Any], source: str) -> str:
    """Returns a record's file and line, or dataset and row; where it has none, the name of its source."""
    return record.place if isinstance(record, PlacedRecord) else source


def as_record(
    row: dict[str, Any],
    place: str,
    columns: dict[str, str] | None,
    answer_after: str | None,
    required: Sequence[str],
    reshape: Callable[[Record, str], Record] | None,
    texts: Sequence[str] = TEXTS,
) -> Record:
    """Returns a row of a file or dataset as a record, checked; see :func:`load_records` for the arguments.

    Raises:
        UsageError: a column or value that can't be used; names the place.
    """
    record = dict(row)
    for target, source in (columns or {}).items():
        where = f"{place}: columns.{target}={source!r}"
        if source in row:
            record[target] = row[source]
        elif "{" in source:
            record[target] = fill(source, row, where)
        else:
            raise UsageError(
                f"{where}: there is no column {source!r}{did_you_mean(source, row)}, only {', '.join(row)}"
            )
    _refuse_other_formats(record, place)
    if reshape is not None:
        record = reshape(record, place)
    for name in dict.fromkeys(("prompt", *required)):
        if record.get(name) is None:
            raise UsageError(f"{place}: there is no {name!r}, only {', '.join(record)}{did_you_mean(name, record)}; "
                             f"columns maps one to it, as in {{{name}: {next(iter(record), 'column')}}}"
                             if name not in record else f"{place}: {name!r} is null")  # fmt: skip
    record["prompt"] = as_prompt(record["prompt"], place)
    for name in (*texts, *(("answer",) if answer_after is not None else ())):
        value = record.get(name)
        if value is not None and not (isinstance(value, str) and value.isascii()):  # nearly all texts of large files
            record[name] = (as_text if name == "answer" else as_answer)(value, f"{place}: {name!r}")
    if answer_after is not None and record.get("answer") is not None:
        _, found, answer = record["answer"].rpartition(answer_after)
        if not found:
            raise UsageError(f"{place}: the answer has no {answer_after!r}, as answer_after wants it to")
        record["answer"] = answer.strip()
    return PlacedRecord(record, place)


def _refuse_other_formats(row: dict[str, Any], place: str) -> None:
    """Refuses, by name, dataset formats that no algorithm here supports."""
    if isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list):
        raise UsageError(f"{place}: 'completions' with 'labels' is stepwise supervision of a process reward model, "
                         "which nothing here learns from; give prompt, completion and label")  # fmt: skip
    messages = row.get("messages", row.get("conversations"))
    first = messages[0] if isinstance(messages, list) and messages else None
    if isinstance(first, dict) and "from" in first and "value" in first and "role" not in first:
        raise UsageError(f"{place}: messages have from and value, ShareGPT's format, where role (system, user, "
                         "assistant) and content should be; convert them, and give them as messages")  # fmt: skip
    for name in ("image", "images"):
        if row.get(name) is not None:
            raise UsageError(f"{place}: {name!r} belongs to a vision dataset, and every algorithm here reads text "
                             "alone; leave the column out")  # fmt: skip


def as_prompt(value: Any, place: str) -> str | list[dict[str, Any]]:
    """Returns a prompt, text or chat messages, checked."""
    if isinstance(value, str):
        return value if value.isascii() else as_text(value, f"{place}: 'prompt'")
    return as_messages(value, f"{place}: 'prompt'")


def as_messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Chat messages, checked: every one has a role, and text as content unless it calls tools.

    Other keys (``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content`` …) are kept for the chat template.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UsageError(f"{what} is {short(value)}, where text or a list of messages with role and content should be")
    messages = [{key: item for key, item in message.items() if item is not None} for message in value]
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), list):
            raise UsageError(f"{what}: message {i} has a list of parts as its content, as vision datasets have it; "
                             "every algorithm here reads text alone")  # fmt: skip
        text = message.get("content", "" if message.get("tool_calls") else None)
        if not isinstance(message.get("role"), str) or not isinstance(text, str):
            raise UsageError(f"{what} is {short(value)}, where text or a list of messages with role and content "
                             f"should be: message {i} lacks one")  # fmt: skip
        messages[i] = {**message, "content": as_text(text, what)}
        as_text(json.dumps(message, ensure_ascii=False, default=str), what)
    return messages


def as_answer(value: Any, what: str) -> str | list[dict[str, Any]]:
    """An answer, checked: a text, or a list of exactly one message of the assistant.

    A message that has nothing but its text becomes the text. Others keep what the chat template may read.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return as_text(value, what)
    messages = as_messages(value, what) if value else []
    if [message["role"] for message in messages] != ["assistant"]:
        raise UsageError(f"{what} has messages of {', '.join(m['role'] for m in messages) or 'nobody'}, where exactly "
                         "one of the assistant should be; end it there, or leave the row out")  # fmt: skip
    return str(messages[0]["content"]) if set(messages[0]) == {"role", "content"} else messages


def as_text(value: Any, what: str) -> str:
    """Text, checked; a number as it is written.

    Args:
        value: of a column.
        what: the place and column, for messages.

    Raises:
        UsageError: another value, or text that can't be written as UTF-8.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(f"{what} is {short(value)}, where text should be")
    try:
        value.encode()  # JSON may hold half of a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} has {value[error.start]!a} in place {error.start}, half of a character; it can't be "
                         "written as UTF-8") from error  # fmt: skip
    return value


def short(value: Any) -> str:
    """Returns a value's type and beginning, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
