"""Conversations cut to a number of tokens: whole turns go first, then tokens."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from rl_modules.language.text.chat_template import counts
from rl_modules.language.text.encoding import Messages

#: Token ids of messages, and which of them count, from the message of a number on.
Encode = Callable[[Messages, int], tuple[list[int], list[bool]]]


def shortened(
    messages: Messages, first: int, encode: Encode, limit: int, keeps_start: bool
) -> tuple[list[int], list[bool]]:
    """The most whole turns of a conversation within ``limit`` tokens, its first or its last ones, encoded.

    Where no turn with an answer that counts, from message ``first`` on, fits, the fewest are cut to the limit. Leading
    system messages stay with the last turns.
    """
    answers = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant" and counts(m)]
    if keeps_start:
        starts = cache(lambda end: encode(messages[:end], first))
        ends = [i + 1 for i in answers] or [len(messages)]
        too_long = bisect_left(ends, True, key=lambda end: len(starts(end)[0]) > limit)
        ids, written = starts(ends[max(0, too_long - 1)])
        return ids[:limit], written[:limit]
    head = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    rests = cache(lambda begin: encode([*messages[:head], *messages[begin:]], max(0, first - begin + head)))
    last = answers[-1] if answers else len(messages)
    begins = [i for i, m in enumerate(messages[:last]) if m["role"] == "user"] or [head]
    short = bisect_left(begins, True, key=lambda begin: len(rests(begin)[0]) <= limit)
    ids, written = rests(begins[min(short, len(begins) - 1)])
    return ids[-limit:], written[-limit:]
