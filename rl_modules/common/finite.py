"""Numbers that JSON can hold."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """Replaces NaN and infinite numbers by None, in nested dictionaries and lists too.

    JSON has no such numbers: Python writes ``NaN`` and ``Infinity``, which other readers refuse.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
