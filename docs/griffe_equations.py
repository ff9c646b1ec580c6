"""Shows the equations in docstrings as blocks: Markdown would join their lines."""

import re
from typing import Any

from griffe import Extension

#: A line of an equation: a short left side, then an equals sign or an arrow.
EQUATION = re.compile(r"^\S.{0,24}?(?: = | ← |\s+=\s)")


def with_blocks(text: str) -> str:
    """Returns a docstring whose paragraphs of equations are indented."""
    paragraphs = re.split(r"(\n\s*\n)", text)
    return "".join(
        "\n".join("    " + line for line in part.splitlines())
        if (lines := part.splitlines()) and part.strip() and all(
            EQUATION.match(line) or line.startswith("  ") for line in lines) and EQUATION.match(lines[0])
        else part
        for part in paragraphs
    )  # fmt: skip


class Equations(Extension):
    """Indents paragraphs of equations in every docstring."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)
