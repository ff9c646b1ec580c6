"""Docstrings as the site shows them: equations as blocks, whose lines Markdown would join; roles of Sphinx as code."""

import re
from typing import Any

from griffe import Extension

#: A line of an equation: a short left side, then an equals sign or an arrow.
EQUATION = re.compile(r"^\S.{0,24}?(?: = | ← |\s+=\s)")
#: A reference to a class or function, with ``~`` before one that goes by its last name.
ROLE = re.compile(r":(?:class|meth|func|data|mod|attr):`(~?)([\w.]+)`")


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


def with_references(text: str) -> str:
    """Returns a docstring whose roles are names in code, linked where the site has the object."""

    def shown(role: re.Match[str]) -> str:
        short, path = role.groups()
        name = path.rpartition(".")[2] if short else path
        return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'

    return ROLE.sub(shown, text)


class Docstrings(Extension):
    """Rewrites every docstring."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_references(with_blocks(obj.docstring.value))
