"""Checks of records of any source, an error naming their place; and their order in training."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from rl_modules.common.errors import UsageError, naming
from rl_modules.common.notices import notice
from rl_modules.common.seeding import stream_seed

#: Columns that must be text where they occur, unless the caller names others; numbers become text.
TEXTS = ("answer", "completion", "chosen", "rejected")


class NothingUsable(UsageError):
    """Raised if all records of a source or of a stream's block are left out; a stream then reads its next block."""


def refuse(place: str, column: str, what: str) -> UsageError:
    """The sentence about a record that can't be used: its file and line, the column, what is wrong, what is right."""
    return UsageError(f"{place}: {column!r} {what}")


def as_prompt(value: Any, place: str) -> str | list[dict[str, Any]]:
    """A prompt, text or chat messages, checked."""
    if isinstance(value, str):
        return value if value.isascii() else as_text(value, f"{place}: 'prompt'")
    return as_messages(value, f"{place}: 'prompt'")


def as_messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Chat messages, checked: each has a role, and text unless it calls tools; other keys are the chat template's."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UsageError(f"{what} is {short(value)}, where text or a list of messages with role and content should be")
    messages = [{key: item for key, item in message.items() if item is not None} for message in value]
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), list):
            message = {**message, "content": _as_content(message["content"], f"{what}: message {i}")}
            if not isinstance(message["content"], str):
                messages[i] = message
                continue
        text = message.get("content", "" if message.get("tool_calls") else None)
        if not isinstance(message.get("role"), str) or not isinstance(text, str):
            raise UsageError(
                f"{what} is {short(value)}, where text or a list of messages with role and content "
                f"should be: message {i} lacks one"
            )
        messages[i] = {**message, "content": as_text(text, what)}
        as_text(json.dumps(message, ensure_ascii=False, default=str), what)
    return messages


def _as_content(parts: list[Any], what: str) -> str | list[dict[str, str]]:
    """Parts of a message's content, ``{"type": "text", "text": …}`` and ``{"type": "image"}``; texts alone as one."""
    read = list[dict[str, str]]()
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image"):
            raise UsageError(f"{what} has the part {short(part)}, where one of text or an image should be")
        read.append({"type": "image"} if kind == "image" else {"type": "text", "text": as_text(part.get("text"), what)})
    return read if any(part["type"] == "image" for part in read) else "".join(part["text"] for part in read)


def as_text(value: Any, what: str) -> str:
    """Text, checked; a number as it is written. ``what`` is the place and column, for messages."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(f"{what} is {short(value)}, where text should be")
    with naming(what):
        value.encode()  # JSON may hold half of a surrogate pair, which no tokenizer takes
    return value


def short(value: Any) -> str:
    """A value's type and beginning, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"


def fitting(
    lengths: Sequence[int],
    limit: int,
    where: str,
    overlong: str = "error",
    noun: str = "prompts",
    remedy: str = "take a model with more positions",
) -> list[int]:
    """Numbers of the records that are short enough; others are refused, or under ``overlong="drop"`` left out."""
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    if dropped := len(lengths) - len(kept):
        first = next(i for i, length in enumerate(lengths) if length > limit)
        if overlong == "error" or not kept:
            refusal = UsageError if overlong == "error" else NothingUsable
            raise refusal(
                f"{where}: {dropped} of {len(lengths)} {noun} are longer than {limit} tokens (record {first} "
                f"has {lengths[first]} tokens); shorten them, {remedy}"
                + ("" if overlong == "drop" else ", or set overlong=drop")
            )
        notice(f"{where}: {dropped} of {len(lengths)} {noun} left out, they are longer than {limit} tokens")
    return kept


# ---------------------------------------------------------------- the order of training


class EndlessOrder:
    """Endless passes over records, each in an order that depends on the seed and the pass alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._passes: dict[int, torch.Tensor] = {}

    def at(self, position: int, n: int) -> int:
        """Which of ``n`` records stands at a position of the endless stream."""
        number, offset = divmod(position, n)
        order = self._passes.get(number)
        if order is None or len(order) != n:
            generator = torch.Generator().manual_seed(stream_seed(self._seed, 0, "order", number))
            order = torch.randperm(n, generator=generator)
            # Two passes may be in use at once, if a batch crosses the end of one. Rounds that are written ahead call
            # this in another thread, so the dictionary is replaced and never changed.
            self._passes = {k: v for k, v in self._passes.items() if k == number - 1} | {number: order}
        return int(order[offset])
