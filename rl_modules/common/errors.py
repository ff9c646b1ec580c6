"""The one exception whose message is written for the person at the keyboard."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Something a person gave can't be used.

    The message is one sentence: the argument or ``file:line``, what came, and what would be right. The command
    line prints it without a traceback.
    """


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """The known words nearest to ``word``, as a clause to append to an error ("" when none is near)."""
    known = list(known)
    # Case is the commonest slip, so names are compared without it.
    by_folded = {name.casefold(): name for name in known}
    near = [by_folded[match] for match in difflib.get_close_matches(word.casefold(), by_folded, n=most, cutoff=0.6)]
    return f"; did you mean {' or '.join(near)}?" if near else ""
