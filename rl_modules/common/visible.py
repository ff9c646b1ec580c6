"""Texts of models and files, made harmless for a terminal."""

import re

#: Characters that move the cursor, change colours, or turn the direction of writing; a line break and a tab stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Replaces control characters by their escapes: the escape character by ``\x1b``."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
