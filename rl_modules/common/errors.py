"""The exception whose message is written for the user."""

import difflib
import re
import traceback
from collections.abc import Iterable
from typing import Any

from rl_modules.common.visible import visible


class UsageError(ValueError):
    """Raised if something that a user gave can't be used.

    The message is one sentence: the argument or ``file:line``, the value that was given, and what would be right. The
    command line prints it without a traceback. Control characters of texts that it quotes are shown as escapes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(str(message)))


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
    given, by_folded = word.casefold(), {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(given, [name for name in by_folded if _is_near(given, name)], most, cutoff=0.6)
    near = [by_folded[match] for match in matches]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def what_happened(error: BaseException) -> str:
    """Describes an exception of the user's code with its file and line, for a message."""
    message = " ".join(str(error).split())[:300]
    places = [f" ({place.filename}:{place.lineno})" for place in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {message}{places[-1] if places else ''}"


def _is_near(one: str, other: str) -> bool:
    """Whether a name may be another one misspelled, or one with a word more or less: ``packing_strategy`` may be
    ``packing``, and is not ``learning_rate``, with which it shares letters alone.
    """
    if len(one) > 2 and other.startswith(one):
        return True
    if difflib.SequenceMatcher(None, one, other).ratio() >= 0.75:
        return True
    few, many = sorted((re.split(r"\W|_", one), re.split(r"\W|_", other)), key=len)
    shared = [a for a in few if any(a == b or (a[:4] == b[:4] and (a in b or b in a) and len(a) > 3) for b in many)]
    return 2 * len(shared) > len(few)
