"""Conversations of several turns as records: the messages, and the prompt before the first answer."""

from typing import Any

from datamodules.language.records import as_messages
from rl_modules.common.errors import UsageError

Record = dict[str, Any]


def as_conversation(row: Record, place: str) -> Record:
    """Converts a row with ``messages``, or with messages as its completion, to a conversation; returns others
    unchanged.

    Args:
        row: the columns of a file's or dataset's row.
        place: its file and line, or dataset and row, for messages.

    Returns:
        The row with ``conversation``, all messages; ``prompt``, the messages before the assistant's first, or before
        the completion; ``completion``, the text of the message after them.

    Raises:
        UsageError: messages that can't be used, or among which the assistant has none.
    """
    completion = row.get("completion")
    if isinstance(completion, list) and completion and isinstance(completion[0], dict):
        answer = as_messages(completion, f"{place}: 'completion'")
        prompt = row.get("prompt")
        asked = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else as_messages(prompt, f"{place}: 'prompt'")
        )
        return {**row, "conversation": [*asked, *answer], "prompt": asked, "completion": answer[0]["content"]}
    if row.get("messages") is None or completion is not None:
        return row
    messages = as_messages(row["messages"], f"{place}: 'messages'")
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not first:
        raise UsageError(f"{place}: 'messages' has roles {', '.join(m['role'] for m in messages)}, where a user's "
                         "message and then an assistant's should be")  # fmt: skip
    return {**row, "conversation": messages, "prompt": messages[:first], "completion": messages[first]["content"]}
