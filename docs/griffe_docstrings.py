"""Docstrings as the site shows them: equations as blocks, whose lines Markdown would join; roles of Sphinx as code;
declared arguments as parameters.
"""

import importlib
import inspect
import re
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind, Parameters

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


def declared(path: str) -> Any:
    """Returns the class at an import path if its arguments are declared in class bodies, else None."""
    module, _, name = path.rpartition(".")
    if not module.startswith(("rl_modules", "datamodules")):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:  # of an extra that is not installed
        return None
    return found if hasattr(getattr(found, "__init__", None), "declares") else None


def constructor(cls: Any) -> Function:
    """Returns the constructor that the declarations make, for the class's signature and its table of arguments."""
    kinds = {inspect.Parameter.KEYWORD_ONLY: ParameterKind.keyword_only}
    parameters = [
        Parameter(name, kind=kinds.get(parameter.kind, ParameterKind.positional_or_keyword),
                  annotation=None if name == "self" else annotated(parameter.annotation),
                  default=None if name == "self" else shown(parameter.default))
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
    ]  # fmt: skip
    return Function("__init__", parameters=Parameters(*parameters))


def annotated(kind: Any) -> str:
    """Returns a type as code, without the modules that its parts come from."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(kind))


def meaning(setting: Any) -> str:
    """Returns what a declaration says of its argument, with its range."""
    limits = (setting.least, setting.most, setting.above, setting.below)
    is_bounded = any(abs(limit) < float("inf") for limit in limits)
    return with_references(setting.says) + (f". Must {setting.range}." if is_bounded else ".")


def shown(default: Any) -> str:
    """Returns a default as code."""
    return default.__name__ if inspect.isclass(default) or inspect.isfunction(default) else repr(default)


class Docstrings(Extension):
    """Rewrites every docstring, and adds the declared arguments to their classes."""

    def on_class(self, *, cls: Any, **others: Any) -> None:
        """Gives a class with declared arguments its constructor and the section of arguments."""
        if cls.docstring is None or (real := declared(cls.path)) is None:
            return
        for name in [name for name in cls.members if name in real.declared_settings]:
            cls.del_member(name)
        cls.set_member("__init__", constructor(real))
        lines = (f"    {name}: {meaning(setting)}" for name, setting in real.declared_settings.items())
        cls.docstring.value += "\n\nArgs:\n" + "\n".join(lines)

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_references(with_blocks(obj.docstring.value))
