"""Whole numbers in scientific notation: ``1e6`` where an argument is an int."""

import inspect
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import jsonargparse
from jsonargparse._loaders_dumpers import yaml_load
from lightning import Trainer


def accept_whole_floats(args: Sequence[str], classes: Iterable[type]) -> list[str]:
    """Makes ``1e6`` and ``1000.0`` valid ints, on the command line and in configs, for arguments that are ints."""
    names = _integer_arguments([*classes, Trainer])

    def load(text: str) -> Any:
        return _converted(yaml_load(text), names)

    jsonargparse.set_loader("yaml", load, _yaml_errors())
    words = list(args)
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option.rpartition(".")[2].lstrip("-") not in names:
            continue
        if equals:
            words[i] = f"{option}={_written_out(value)}"
        elif i + 1 < len(words):
            words[i + 1] = _written_out(words[i + 1])
    return words


def _written_out(value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        return value
    return str(int(number)) if number.is_integer() and abs(number) < 2**63 else value


def _converted(value: Any, names: set[str], name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _converted(part, names, str(key)) for key, part in value.items()}
    return int(value) if isinstance(value, float) and name in names and value.is_integer() else value


def _integer_arguments(classes: Iterable[type]) -> set[str]:
    """Returns the names of the arguments that accept ints but not floats."""
    found: dict[str, Any] = {}
    for base in {base for cls in classes for base in cls.__mro__ if "__init__" in vars(base)}:
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        found.update({name: p.annotation for name, p in parameters.items()})
    return {name for name, kind in found.items() if kind is int or (int in (args := typing.get_args(kind)) and not
            {float, str, bool} & set(args))}  # fmt: skip


def _yaml_errors() -> tuple[type[Exception], ...]:
    import yaml

    return (yaml.YAMLError,)
