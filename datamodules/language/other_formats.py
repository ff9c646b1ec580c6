"""Rows of ShareGPT's and Alpaca's formats, read as messages, prompts and completions."""

from typing import Any

from datamodules.language.sources import refuse
from datamodules.language.tasks.base import Record

#: Role of who speaks in a ShareGPT conversation.
ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
#: Columns that may hold messages.
_TALKS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")


def in_own_format(row: Record, place: str) -> Record:
    """A row with ``from`` and ``value`` as ``role`` and ``content``, ``conversations`` as ``messages``, and Alpaca's
    ``instruction``, ``input`` and ``output`` as ``prompt`` and ``completion``; any other row as it is.

    Both formats may have a column ``system``, and Alpaca's a ``history`` of questions with their answers. A row with a
    ``text`` stays a text.
    """
    talks = {name: row[name] for name in _TALKS if _is_sharegpt(row.get(name))}
    if talks:
        row = {**row, **{name: _as_messages(talk, place, name) for name, talk in talks.items()}}
        first = next(name for name in _TALKS if name in talks)
        row[first] = [*_system(row, row[first]), *row[first]]
    if row.get("messages") is None and isinstance(row.get("conversations"), list):
        row = {**row, "messages": row["conversations"]}
        del row["conversations"]
    if isinstance(row.get("instruction"), str) and all(row.get(k) is None for k in ("prompt", "messages", "text")):
        row = {**row, "prompt": _alpaca_prompt(row, place)}
        if row.get("completion") is None and row.get("output") is not None:
            row["completion"] = row["output"]
    return row


def _is_sharegpt(talk: Any) -> bool:
    first = talk[0] if isinstance(talk, list) and talk else talk
    return isinstance(first, dict) and "from" in first and "value" in first and "role" not in first


def _as_messages(talk: Any, place: str, name: str) -> list[Any]:
    messages = []
    for i, turn in enumerate(talk if isinstance(talk, list) else [talk]):  # a preferred answer may be a turn alone
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in ROLES:
            what = f"has a message {i} from {speaker!r}, where one of {', '.join(ROLES)} should be"
            raise refuse(place, name, what)
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({**others, "role": ROLES[speaker], "content": turn.get("value")})
    return messages


def _system(row: Record, messages: list[Any]) -> list[Record]:
    text = row.get("system")
    has_own = bool(messages) and messages[0]["role"] in ("system", "developer")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text and not has_own else []


def _alpaca_prompt(row: Record, place: str) -> str | list[Record]:
    """The instruction and, on a line of its own, its input; as messages where others come before."""
    asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    before = _system(row, [])
    for pair in row.get("history") or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise refuse(place, "history", f"has {pair!r}, where a question and its answer should be")
        before += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return [*before, {"role": "user", "content": asked}] if before else asked
