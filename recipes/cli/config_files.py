"""Reads config files before the parser does, so that a mistake is reported with its file and line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_modules.common.errors import UsageError

#: Names of kinds of values in messages.
_KINDS = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value", yaml.MappingNode: "a mapping"}


def check(path: Path) -> set[str]:
    """Checks that a file is a YAML mapping without duplicate keys."""
    root = _tree(path)
    if root is None:
        raise UsageError(f"{path} is empty; a config has model, data and perhaps trainer (`rl copy ppo/cartpole.yaml "
                         "mine.yaml` makes one to edit)")  # fmt: skip
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds {_KINDS[type(root)]} (type {_type_name(root)}), where a config has the keys "
                         "model, data and perhaps trainer")  # fmt: skip
    _check_keys(path, root)
    for key, value in root.value:
        if key.value in ("model", "data"):
            _check_class(path, key.value, value)
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
    node = next((value for key, value in _tree(path).value if key.value == group), None)
    if not isinstance(node, yaml.MappingNode):
        return None if node is None else "class"
    return "class" if "class_path" in {key.value for key, _ in node.value} else "arguments"


def _tree(path: Path) -> Any:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a YAML file in UTF-8 (byte 0x{error.object[error.start]:02x} at position "
                         f"{error.start}); save it as UTF-8 text, or give another file") from error  # fmt: skip
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        if "'\\t'" in str(error.problem):
            raise UsageError(f"{path}:{line}: a tab, where YAML is indented by spaces alone") from error
        raise UsageError(f"{path}:{line}: not valid YAML, {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error


def _check_keys(path: Path, node: Any) -> None:
    """Raises for a duplicate key, of which YAML would silently keep the last, and for a tag that means code."""
    place = f"{path}:{node.start_mark.line + 1}"
    if node.tag.startswith("tag:yaml.org,2002:python") or node.tag.startswith("!"):
        raise UsageError(f"{place}: the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} would make a Python object; "
                         "a config holds numbers, text, lists and mappings only")  # fmt: skip
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _check_keys(path, part)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"{path}:{line}: a key is {_KINDS[type(key)]}, where text should be; a template's "
                                 "{{ name }} must be filled in before")  # fmt: skip
            if key.value in seen and key.value != "<<":
                raise UsageError(f"{path}:{line}: the key {key.value!r} is given twice, first in line "
                                 f"{seen[key.value]}; keep one of them")  # fmt: skip
            seen[key.value] = line
            _check_keys(path, value)


def _check_class(path: Path, group: str, node: Any) -> None:
    """Raises an error if an argument of a class is next to ``class_path`` instead of in ``init_args``."""
    if not isinstance(node, yaml.MappingNode):
        return
    keys = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
    arguments = keys.get("init_args")
    if arguments is not None and not isinstance(arguments[1], yaml.MappingNode) and arguments[1].value:
        raise UsageError(f"{path}:{arguments[0].start_mark.line + 1}: {group}.init_args is {_KINDS[type(arguments[1])]}"
                         ", where a mapping of the class's arguments should be")  # fmt: skip
    if "class_path" in keys and (wrong := sorted(keys.keys() - {"class_path", "init_args", "dict_kwargs", "<<"})):
        line = keys[wrong[0]][0].start_mark.line + 1
        raise UsageError(f"{path}:{line}: {group}.{wrong[0]} stands beside class_path; the class's arguments belong "
                         "under init_args")  # fmt: skip


def _type_name(node: Any) -> str:
    return type(yaml.safe_load(yaml.serialize(node))).__name__
