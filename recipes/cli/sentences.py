"""Turns jsonargparse's error messages into one sentence: what was given, where, and the nearest known name."""

import contextlib
import inspect
import re
from typing import Any

from lightning import Trainer

import datamodules
import rl_modules
from rl_modules.common.errors import did_you_mean


def one_sentence(message: str) -> str:
    """Returns a parser's message as one sentence that names the argument, its value and what would be right."""
    text = " ".join(message.split())
    if missing := re.search(r"arguments are required: (?:\w+\.)?(model|data)\b", text):
        return which_class(missing.group(1))
    group = re.search(r'Parser key "(?:\w+\.)*?(model|data|trainer)\b', text)
    where = group.group(1) if group else ""
    # The type of a class argument is a union with None; only the message about the class helps.
    union = re.search(r"Errors: - (.+?) (?:- Expected a <class 'NoneType'>|Given value type)", text)
    if union and not union.group(1).startswith("Expected a dot import path"):
        return _class_argument(text, union.group(1), where)
    unknown = (
        re.search(r"Option '([\w.]+)' is not accepted", text)
        or re.search(r"[Uu]nrecognized arguments: (?:--)?([\w.]+)", text)
        or re.search(r"does not accept option '([\w.]+)'", text)
    )
    if unknown:
        first, _, rest = unknown.group(1).partition(".")
        known = _known_options(first) if rest else {"model", "data", "trainer", "seed_everything", "ckpt_path"}
        return f"unknown option {unknown.group(1)!r}{did_you_mean(rest or first, known)}"
    if klass := re.search(r"Expected a dot import path string: (\S+)", text):
        classes = rl_modules.__all__ if where == "model" else datamodules.__all__
        name = klass.group(1).rpartition(".")[2]
        return f"{where} class {name!r} is unknown; known are {', '.join(classes)}{did_you_mean(name, classes)}"
    if wrong := re.search(r'Parser key "([\w.]+)": Expected an? (.+?)\.? Got value: (.+?)(?: - |$)', text):
        key, expected, got = wrong.groups()
        return f"{key}={got!r} can't be used; it must be of type {_plain_types(expected)}"
    return text


def which_class(what: str) -> str:
    """Returns the sentence for a command line that names no model, or no data."""
    return f"no {what} is given; name one with --config (`rl list` shows the installed ones) or --{what} CLASS"


def _class_argument(text: str, inner: str, where: str) -> str:
    """Returns the sentence for a message about an argument of the model's or the datamodule's class."""
    plain = re.search(r'Parser key "([\w.]+)".*?Errors: - Expected an? (.+?) - Expected.*Given value: (\S+)$', text)
    if plain and inner.startswith("Expected a"):
        key, expected, got = plain.groups()
        return f"{key}={got!r} can't be used; it must be of type {_plain_types(expected)}"
    if own := re.search(r"(?:unknown option '|^)([\w.]+)(?:'|=\S+ can't be used)", inner):
        name = own.group(1)
        if "unknown option" in inner and name in _known_options(where):
            return f"{where}.{name} is given without a class; name the class with --{where} CLASS or --config"
        if "unknown option" in inner:
            return f"unknown option '{where}.{name}'{did_you_mean(name, _known_options(where))}"
        return f"{where}.{inner}"
    return inner


def _plain_types(text: str) -> str:
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _known_options(where: str) -> set[str]:
    """Returns every option of the classes of a group."""
    classes: list[Any] = [Trainer] if where == "trainer" else []
    for package, group in ((rl_modules, "model"), (datamodules, "data")):
        if where in (group, ""):
            for name in package.__all__:
                # A language class whose libraries are not installed has no options to offer.
                with contextlib.suppress(ModuleNotFoundError):
                    classes.append(getattr(package, name))
    bases = {base for cls in classes for base in cls.__mro__ if "__init__" in vars(base)}
    names = {name for base in bases for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "args", "kwargs"}
