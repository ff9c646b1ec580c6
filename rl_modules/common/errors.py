"""The exception whose message is written for the user."""

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class UsageError(ValueError):
    """Raised if something that a user gave can't be used.

    The message is one sentence: the argument or ``file:line``, the value that was given, and what would be right. The
    command line prints it without a traceback. Control characters of texts that it quotes are shown as escapes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(str(message)))


@contextmanager
def naming(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Adds to a library's error which argument or file it is about: ``with naming("path='mine.yaml'")``."""
    caught: tuple[type[Exception], ...] = (OSError, TypeError, ValueError, *kinds)
    try:
        yield
    except UsageError:
        raise
    except caught as error:
        said = f"{type(error).__name__}: {' '.join(text_of(error).split())[:300]}".removesuffix(": ")
        raise UsageError(f"{what}: {said}") from error


def did_you_mean(word: Any, known: Iterable[str], most: int = 3) -> str:
    """Returns the known words nearest to ``word``, as a clause to append to an error ("" when none is near)."""
    word = str(getattr(word, "__name__", getattr(word, "name", word)))
    known = list(known)
    # Names are compared without case, because case is the most common mistake.
    given, by_folded = word.casefold(), {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(given, [name for name in by_folded if _is_near(given, name)], most, cutoff=0.6)
    near = [by_folded[match] for match in matches]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def text_of(error: BaseException) -> str:
    """An error's own text, also where an error of the user's own can't say it."""
    try:
        return str(error)
    except Exception:
        return "without a text"


def what_happened(error: BaseException) -> str:
    """Describes an exception of the user's code with its file and line, for a message."""
    message = " ".join(text_of(error).split())[:300]
    places = [f" ({place.filename}:{place.lineno})" for place in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {message}{places[-1] if places else ''}"


def _is_near(one: str, other: str) -> bool:
    """Whether a name may be another one misspelled, or one with a word more or less, as ``packing_strategy``."""
    if len(one) > 2 and other.startswith(one):
        return True
    if difflib.SequenceMatcher(None, one, other).ratio() >= 0.75:
        return True
    few, many = sorted((re.split(r"\W|_", one), re.split(r"\W|_", other)), key=len)
    shared = [a for a in few if any(a == b or (a[:4] == b[:4] and (a in b or b in a) and len(a) > 3) for b in many)]
    return 2 * len(shared) > len(few)


#: Characters that move the cursor, change colours, or turn the direction of writing; a line break and a tab stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Replaces control characters by their escapes: the escape character by ``\x1b``."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def real_number(name: str, value: Any) -> float:
    """``value`` as a float."""
    if isinstance(value, str | bool) or not hasattr(value, "__float__"):
        raise UsageError(f"{name}={value!r} must be a number")
    return float(value)


def at_least(name: str, value: Any, least: int = 1, unit: str = "") -> int:
    """``value`` as an int; a float such as 1e6 counts where it is whole."""
    number = real_number(name, value)
    if not number.is_integer():
        raise UsageError(f"{name}={value} must be a whole number")
    if number < least:
        raise UsageError(f"{name}={value} must be at least {least}{f' {unit}' if unit else ''}")
    return int(value)


def require_same(name: str, value: Any, saved: Any) -> None:
    """Refuses to resume with another value of an argument than the checkpoint's."""
    if value != saved:
        raise UsageError(f"{name}={value} differs from the checkpoint's {saved}; resume with that")


def require_one(given: Mapping[str, Any]) -> str:
    """Returns the name of the one argument among several that is given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        *first, last = given
        came = " and ".join(names) or "none"
        raise UsageError(f"give exactly one of {', '.join(first)} and {last}; got {came}")
    return names[0]
