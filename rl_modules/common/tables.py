"""Texts in TensorBoard: completions beside their prompts and scores."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(columns: Mapping[str, Sequence[Any]], rows: int = 8, width: int = 500) -> str:
    """Formats a Markdown table, with escapes so that no text can break its layout.

    Args:
        columns: values by heading, all of one length.
        rows: how many to show.
        width: characters of a text to show; the rest is cut off with an ellipsis.
    """
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for values in list(zip(*columns.values(), strict=True))[:rows]:
        lines.append(f"| {' | '.join(_cell(value, width) for value in values)} |")
    return "\n".join(lines)


def _cell(value: Any, width: int) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    text = text if len(text) <= width else text[: width - 1] + "…"
    for character, harmless in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(character, harmless)
    return text.replace("\n", "<br>")
