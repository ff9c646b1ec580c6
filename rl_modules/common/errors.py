"""The exception whose message is written for the user."""

import difflib
import traceback
from collections.abc import Iterable
from typing import Any


class UsageError(ValueError):
    """Raised if something that a user gave can't be used.

    The message is one sentence: the argument or ``file:line``, the value that was given, and what would be right. The
    command line prints it without a traceback.
    """


def did_you_mean(word: Any, known: Iterable[str], most: int = 3) -> str:
    """Returns the known words nearest to ``word``, as a clause to append to an error ("" when none is near).

    Args:
        word: the given value; a class or an enum's member is compared by name, as ``torch.nn.ReLU`` with ``relu``.
        known: the words that would be right.
        most: how many are named.
    """
    word = str(getattr(word, "__name__", getattr(word, "name", word)))
    known = list(known)
    # Names are compared without case, because case is the most common mistake.
    by_folded = {name.casefold(): name for name in known}
    near = [by_folded[match] for match in difflib.get_close_matches(word.casefold(), by_folded, n=most, cutoff=0.6)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def what_happened(error: BaseException) -> str:
    """Describes an exception of the user's code with its file and line, for a message."""
    message = " ".join(str(error).split())[:300]
    places = [f" ({place.filename}:{place.lineno})" for place in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {message}{places[-1] if places else ''}"
