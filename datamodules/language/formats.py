"""Conversion of a file's or dataset's row to a record, with checks: prompts, answers, preferences, conversations."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datamodules import language
from datamodules.language.other_formats import in_own_format
from datamodules.language.sources import TEXTS, as_messages, as_prompt, as_text, refuse, short
from datamodules.language.tasks.base import Record, fill
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.language.text.records import PlacedRecord

#: Columns of formats that are read otherwise, or not at all.
_OF_OTHER_FORMATS = frozenset({"completions"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def as_record(
    row: dict[str, Any],
    place: str,
    columns: dict[str, str] | None,
    answer_after: str | None,
    required: Sequence[str],
    reshape: Callable[[Record, str], Record] | None,
    texts: Sequence[str] = TEXTS,
    folder: Path | None = None,
) -> Record:
    """A row of a file or dataset as a record, checked; see :func:`load_records` for the arguments."""
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
    record = in_own_format(record, place)
    _refuse_other_formats(record, place)
    if has_images(record):
        record = language.with_images(record, place, folder)
    if reshape is not None:
        record = reshape(record, place)
    for name in dict.fromkeys(("prompt", *required)):
        if record.get(name) is None:
            texts = [key for key, value in record.items() if isinstance(value, str) or _has_messages(value)]
            advice = "give it as text, or as messages (token ids are not read)"
            if texts or not record:
                advice = f"columns maps one to it, as in {{{name}: {next(iter(texts), 'column')}}}"
            raise refuse(
                place,
                name,
                "is null"
                if name in record
                else f"is missing, there is only {', '.join(record)}{did_you_mean(name, record)}; {advice}",
            )
    record["prompt"] = as_prompt(record["prompt"], place)
    for name in (*texts, *(("answer",) if answer_after is not None else ())):
        value = record.get(name)
        if value is not None and not (isinstance(value, str) and value.isascii()):  # nearly all texts of large files
            record[name] = (as_text if name == "answer" else as_answer)(value, f"{place}: {name!r}")
    if answer_after is not None and record.get("answer") is not None:
        _, found, answer = record["answer"].rpartition(answer_after)
        if not found:
            raise refuse(place, "answer", f"has no {answer_after!r}, as answer_after wants it to")
        record["answer"] = answer.strip()
    return PlacedRecord(record, place)


def _has_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _refuse_other_formats(row: dict[str, Any], place: str) -> None:
    """Refuses, by name, dataset formats that no algorithm here supports."""
    if _OF_OTHER_FORMATS.isdisjoint(row):
        return
    if isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list):
        what = "with 'labels' is stepwise supervision of a process reward model; give prompt, completion and label"
        raise refuse(place, "completions", what)


def has_images(row: dict[str, Any]) -> bool:
    """Whether a row has images, in a column or as parts of its messages."""
    if row.get("images") is not None or row.get("image") is not None:
        return True
    talks = [value for value in row.values() if _has_messages(value)]
    contents = [message.get("content") for talk in talks for message in talk if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def as_answer(value: Any, what: str) -> str | list[dict[str, Any]]:
    """An answer, checked: a text, or messages that end with the assistant's; a single one of text alone is the text."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return as_text(value, what)
    messages = as_messages(value, what) if value else []
    if not messages or messages[-1]["role"] != "assistant":
        raise UsageError(
            f"{what} has messages of {', '.join(m['role'] for m in messages) or 'nobody'}, where the last "
            "one should be the assistant's; end it there, or leave the row out"
        )
    is_text = len(messages) == 1 and set(messages[0]) == {"role", "content"}
    return str(messages[0]["content"]) if is_text else messages


def as_conversation(row: Record, place: str) -> Record:
    """A row of messages with ``conversation``, the ``prompt`` before the first answer, and that as ``completion``."""
    completion = row.get("completion")
    if isinstance(completion, list) and completion and isinstance(completion[0], dict):
        answer = as_messages(completion, f"{place}: 'completion'")
        prompt = row.get("prompt")
        is_text = isinstance(prompt, str)
        asked = [{"role": "user", "content": prompt}] if is_text else as_messages(prompt, f"{place}: 'prompt'")
        return {**row, "conversation": [*asked, *answer], "prompt": asked, "completion": answer[0]["content"]}
    if row.get("messages") is None or completion is not None:
        return row
    messages = as_messages(row["messages"], f"{place}: 'messages'")
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not first:
        raise refuse(
            place,
            "messages",
            f"has roles {', '.join(m['role'] for m in messages)}, where a user's message "
            "and then an assistant's should be",
        )
    return {**row, "conversation": messages, "prompt": messages[:first], "completion": messages[first]["content"]}


def as_preference(row: Record, place: str) -> Record:
    """A row as ``prompt``, ``chosen`` and ``rejected`` (see :func:`as_answer`); one without an answer is unchanged.

    Messages, or text up to its last white space, with which both answers begin belong to the prompt.
    """
    row = {name: as_number(value) if name in ("margin", "probability") else value for name, value in row.items()}
    for name, least, most, what in (
        ("margin", -sys.float_info.max, sys.float_info.max, "a number, the units of reward by which chosen should win"),
        ("probability", 0, 1, "a number in [0, 1], with which the chosen answer wins"),
    ):
        value = row.get(name)
        if value is not None and not (_is_number(value) and least <= value <= most):
            raise refuse(place, name, f"is {value!r}, where {what}, should be; map another column to the name")
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        return row
    if isinstance(chosen, list) and isinstance(rejected, list):
        return {**row, **_from_messages(row.get("prompt"), chosen, rejected, place)}
    if isinstance(chosen, list) or isinstance(rejected, list):
        raise refuse(
            place,
            "chosen",
            f"is a {type(chosen).__name__} and 'rejected' a {type(rejected).__name__}; give "
            "both as texts, or both as lists of messages",
        )
    if row.get("prompt") is None and isinstance(chosen, str) and isinstance(rejected, str):
        cut = end_of_prompt(chosen, rejected)
        return {**row, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}
    return row


def end_of_prompt(chosen: str, rejected: str) -> int:
    """Where the common beginning of two texts ends: before its last white space, else at its last character."""
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    shared = chosen[:n]
    last = max((i for i, character in enumerate(shared) if character.isspace()), default=n)
    return n if last == n else len(shared[: last + 1].rstrip())


def _from_messages(prompt: Any, chosen: list[Any], rejected: list[Any], place: str) -> Record:
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not messages:
            raise refuse(place, name, "is an empty list, where messages with role and content should be")
    if not shared and prompt is None:
        raise refuse(place, "chosen", "and 'rejected' share no message, and there is no prompt; give the prompt")
    if shared:
        before = chosen[:shared]
        if isinstance(prompt, list) and prompt != before:
            prompt = [*prompt, *before]
        elif not isinstance(prompt, str) or before != [{"role": "user", "content": prompt}]:
            # One message that is the prompt in words stays in words, for tokenizers without a chat template.
            prompt = before
    answers = {
        name: as_answer(messages[shared:], f"{place}: {name!r}")
        for name, messages in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": prompt, **answers}


def decoded(row: Record, place: str, names: Sequence[str], tokenizer: Any) -> Record:
    """A row whose texts are given as token ids, ``prompt_ids`` and an answer's, with the texts that they spell."""
    texts = {}
    for name in names:
        ids = row.get(f"{name}_ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
            raise refuse(
                place,
                f"{name}_ids",
                f"is {short(ids)}, where a list of token ids from 0 to "
                f"{len(tokenizer) - 1} should be; a row has all its texts as ids, or none",
            )
        texts[name] = tokenizer.decode(ids)
    return {**row, **texts}


def as_judgement(row: Record, place: str) -> Record:
    """A row as ``prompt``, ``completion`` and ``label``, or as a pair, see :func:`as_preference`."""
    completion, label = row.get("completion"), as_number(row.get("label"))
    if label is None and row.get("chosen") is not None and row.get("rejected") is not None:
        # A table gives each row the columns of all others, so a judgement may have a pair's columns as null.
        pair = {name: value for name, value in row.items() if name not in ("completion", "label")}
        return as_preference(pair, place)
    if completion is None or label is None:
        raise refuse(
            place,
            "completion",
            f"and 'label', or 'chosen' and 'rejected', should be among the columns "
            f"{', '.join(map(repr, row)) or '(none)'}; name them with `columns`",
        )
    if label not in (0, 1):
        raise refuse(place, "label", f"is {label!r}, where true or false should be")
    return {**row, "completion": as_answer(completion, f"{place}: 'completion'"), "label": bool(label)}


def as_number(value: Any) -> Any:
    """The number or truth value that a text spells, None for an empty one; any other value as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text):
        number = float(text)
        return int(number) if number.is_integer() else number
    return value if text else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
