"""Reads config files before the parser does, so that a mistake is reported with its file and line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_modules.common.errors import UsageError

#: Names of kinds of values in messages.
_KINDS = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value", yaml.MappingNode: "a mapping"}


def check(path: Path) -> set[str]:
    """Checks that a file is a YAML mapping without duplicate keys; returns the keys of its first level."""
    root = _tree(path)
    if root is None:
        raise UsageError(f"{path} is empty; a config has model, data and perhaps trainer (`rl copy ppo/cartpole.yaml "
                         "mine.yaml` makes one to edit)")  # fmt: skip
    if not isinstance(root, yaml.MappingNode):
        kind = type(yaml.safe_load(path.read_text("utf-8"))).__name__
        raise UsageError(f"{path} holds {_KINDS[type(root)]} (type {kind}), where a config has the keys model, data "
                         "and perhaps trainer")  # fmt: skip
    _check_keys(path, root)
    for key, value in root.value:
        if key.value in ("model", "data") and isinstance(value, yaml.MappingNode):
            keys = {name.value: (name, node) for name, node in value.value}
            if "init_args" in keys:
                _require_mapping(path, f"{key.value}.init_args", *keys["init_args"])
            wrong = sorted(keys.keys() - {"class_path", "init_args", "dict_kwargs", "<<"})
            if "class_path" in keys and wrong:
                line = keys[wrong[0]][0].start_mark.line + 1
                raise UsageError(f"{path}:{line}: {key.value}.{wrong[0]} stands beside class_path; the class's "
                                 "arguments belong under init_args")  # fmt: skip
        elif key.value in ("trainer", "checkpoint"):
            _require_mapping(path, key.value, key, value)
    return {key.value for key, _ in root.value}


def check_order(paths: Sequence[Path]) -> None:
    """Refuses a file with arguments of a class that a later file names: the parser would not know of which class."""
    for group in ("model", "data"):
        places = [_place_of_class(path, group) for path in paths]
        if "class" in places and "arguments" in places[: (first := places.index("class"))]:
            early = paths[places.index("arguments")]
            raise UsageError(f"{early}: {group} has arguments of the class that {paths[first]} names; give --config "
                             f"{paths[first]} before it")  # fmt: skip


def _place_of_class(path: Path, group: str) -> str | None:
    """Returns whether a file names a group's class or only gives arguments; None: neither."""
    node = yaml.safe_load(path.read_text("utf-8")).get(group)
    if not isinstance(node, dict):
        return None if node is None else "class"
    return "class" if "class_path" in node else "arguments"


def _tree(path: Path) -> Any:
    try:
        text = path.read_bytes().decode("utf-8")
        yaml.safe_load(text)  # a tag would make a Python object, and a list can't be a key
        return yaml.compose(text, yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a YAML file in UTF-8 (byte 0x{error.object[error.start]:02x} at position "
                         f"{error.start}); save it as UTF-8 text, or give another file") from error  # fmt: skip
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else f"{path}"
        said = getattr(error, "problem", None) or getattr(error, "context", None) or error
        raise UsageError(f"{place}: not a valid YAML file, {' '.join(str(said).split())}") from error


def _check_keys(path: Path, node: Any) -> None:
    """Raises for a duplicate key, of which YAML would silently keep the last."""
    for part in node.value if isinstance(node, yaml.SequenceNode) else []:
        _check_keys(path, part)
    seen: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        line = key.start_mark.line + 1
        if key.value in seen and key.value != "<<":
            raise UsageError(f"{path}:{line}: the key {key.value!r} is given twice, first in line {seen[key.value]}; "
                             "keep one of them")  # fmt: skip
        seen[key.value] = line
        _check_keys(path, value)


def _require_mapping(path: Path, name: str, key: Any, node: Any) -> None:
    if not isinstance(node, yaml.MappingNode) and node.value:
        raise UsageError(f"{path}:{key.start_mark.line + 1}: {name} is {_KINDS[type(node)]}, where a mapping of the "
                         "class's arguments should be")  # fmt: skip
