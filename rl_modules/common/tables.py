"""Texts in TensorBoard: completions beside their prompts and scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_modules.common.visible import visible

#: Characters with a meaning in Markdown or HTML, as entities.
_ENTITIES = str.maketrans({character: f"&#{ord(character)};" for character in "&<>|`*_[]\\~"})


def markdown_table(columns: Mapping[str, Sequence[Any]], rows: int = 8, width: int = 500) -> str:
    """Formats a Markdown table, which shows every text as it is: no text breaks the layout, or becomes an image or a
    link.

    Args:
        columns: values by heading, all of one length.
        rows: how many to show.
        width: characters of a text to show; the rest is cut off with an ellipsis.
    """
    lines = [f"| {' | '.join(_cell(name, width) for name in columns)} |", f"|{'---|' * len(columns)}"]
    for values in list(zip(*columns.values(), strict=True))[:rows]:
        lines.append(f"| {' | '.join(_cell(value, width) for value in values)} |")
    return "\n".join(lines)


def _cell(value: Any, width: int) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    text = text if len(text) <= width else text[: width - 1] + "…"
    return visible(text).translate(_ENTITIES).replace("\n", "<br>")
