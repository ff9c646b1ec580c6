"""Converts the forms of preferences to one: a prompt and two answers."""

import math
from typing import Any

from datamodules.language.base import Record
from datamodules.language.csv_files import as_number
from datamodules.language.records import as_answer
from rl_modules.common.errors import UsageError


def as_preference(row: Record, place: str) -> Record:
    """Converts a row to ``prompt`` (text or messages), ``chosen`` and ``rejected`` (see
    :func:`~datamodules.language.records.as_answer`), and perhaps ``margin``.

    Answers may be lists of chat messages, of which the last one is the answer; the messages before it, which both
    lists share, belong to the prompt. If texts have no prompt, the prompt is their common beginning up to its last
    white space.

    Args:
        row: the columns of a file's or dataset's row.
        place: its file and line, or dataset and row, for messages.

    Returns:
        The row with those columns; a row in which an answer is missing is returned unchanged.

    Raises:
        UsageError: the margin is not a number, the answers have different forms, or the conversations differ before
            their last message.
    """
    row = {name: as_number(value) if name in ("margin", "probability") else value for name, value in row.items()}
    margin = row.get("margin")
    if margin is not None and not (_is_number(margin) and math.isfinite(margin)):
        raise UsageError(f"{place}: margin={margin!r} is not a number; give the units of reward by which the chosen "
                         "answer should win")  # fmt: skip
    probability = row.get("probability")
    if probability is not None and not (_is_number(probability) and 0 <= probability <= 1):
        raise UsageError(f"{place}: probability={probability!r} must be a number in [0, 1], with which the chosen "
                         "answer wins; map another column to the name, or drop this one")  # fmt: skip
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        return row
    if isinstance(chosen, list) and isinstance(rejected, list):
        return {**row, **_from_messages(row.get("prompt"), chosen, rejected, place)}
    if isinstance(chosen, list) or isinstance(rejected, list):
        raise UsageError(f"{place}: one of chosen and rejected is text, the other a list of messages; give both in "
                         "one form")  # fmt: skip
    if row.get("prompt") is None and isinstance(chosen, str) and isinstance(rejected, str):
        cut = end_of_prompt(chosen, rejected)
        return {**row, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}
    return row


def end_of_prompt(chosen: str, rejected: str) -> int:
    """Returns where the common beginning of two texts ends: before its last white space, where a word begins.

    Without white space in it, at its last character.
    """
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
        if len(messages) != shared + 1:
            raise UsageError(f"{place}: {name!r} has {len(messages) - shared} messages after the {shared} that both "
                             "answers share, where exactly one with role and content should be")  # fmt: skip
    if shared:
        before = chosen[:shared]
        if isinstance(prompt, list) and prompt != before:
            prompt = [*prompt, *before]
        elif not isinstance(prompt, str) or before != [{"role": "user", "content": prompt}]:
            # One message that is the prompt in words stays in words, for tokenizers without a chat template.
            prompt = before
    answers = {name: as_answer(messages[-1:], f"{place}: {name!r}")
               for name, messages in (("chosen", chosen), ("rejected", rejected))}  # fmt: skip
    return {"prompt": prompt, **answers}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
