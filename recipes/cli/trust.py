"""What the settings of a folder that somebody sent may name: what this project registers, Lightning's and torch's."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks

import datamodules
import rl_modules
from datamodules.registered import code_of_environment
from recipes.run_files import group
from rl_modules.common.arguments import OWN_NETWORKS
from rl_modules.common.named_code import named_code, parts_of, refuse_named

_PACKAGES = {"model": rl_modules, "data": datamodules}
_AGAIN = "give --trust, which runs what the folder names"


def require_registered(config: dict[str, Any], file: Path) -> None:
    """Refuses code that a run's recorded settings name; nothing of them is imported before."""
    for name in _PACKAGES:
        group(config, name, file)
    for name, value in config.items():
        others = ((name, path) for path in (*_of_objects(value), *_files(value)))
        for argument, path in _of_class(name, value) if name in _PACKAGES else others:
            refuse_named(str(file), argument, [path], _AGAIN)


def _of_class(name: str, node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the arguments of a model or datamodule that name code, with the code."""
    path = str(node.get("class_path"))
    module, _, kind = path.rpartition(".")
    found = getattr(_PACKAGES[name], kind) if kind in _PACKAGES[name].__all__ else None
    settings = node.get("init_args") or {}
    modules = () if found is None else ("", _PACKAGES[name].__name__, found.__module__)
    if module not in modules or {*node} - {"class_path", "init_args"}:
        yield f"{name}.class_path", path
    if not isinstance(settings, Mapping):
        yield f"{name}.init_args", str(settings)
        return
    for argument, value in settings.items():
        declared = found.declared_settings.get(argument) if found is not None else None
        paths: Iterable[str] = _of_objects(value)
        if argument in OWN_NETWORKS:
            paths = [] if value is None else [str(value.get("class_path") if isinstance(value, Mapping) else value)]
        elif argument == "env_id":
            paths = (*code_of_environment(value), *_files(value))
        elif declared is not None and declared.stores is False:
            paths = (*paths, *_files(value))
        elif declared is not None and declared.code is not None:
            paths = declared.code(value)
        yield from ((f"{name}.{argument}", path) for path in paths)


def _of_objects(value: Any) -> Iterator[str]:
    """Yields what names code, or a file of settings, where the parser may make objects."""
    for node in _nodes(value):
        module, _, kind = str(node["class_path"]).rpartition(".")
        if kind not in _KNOWN.get(module, ()):
            yield str(node["class_path"])
    known = {f"{module}.{kind}" for module, kinds in _KNOWN.items() for kind in kinds}
    yield from (path for path in named_code(value) if path not in known)


#: Classes of other packages that a config may name, by module.
_KNOWN: dict[str, Iterable[str]] = {
    "": ("NormalActionNoise", "OrnsteinUhlenbeckActionNoise"),
    "rl_modules.action_noise": ("NormalActionNoise", "OrnsteinUhlenbeckActionNoise"),
    "torch.optim": torch.optim.__all__,
    "torch.optim.lr_scheduler": torch.optim.lr_scheduler.__all__,
    "lightning.pytorch.callbacks": callbacks.__all__,
}


def _nodes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the dictionaries in a value that name a class."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            if "class_path" in part:
                yield part
            pending += part.values()
        elif isinstance(part, list | tuple):
            pending += part


def _files(value: Any) -> Iterator[str]:
    """Yields the texts that name a file, which the parser would read as settings."""
    for part in parts_of(value):
        if isinstance(part, str) and part and "\0" not in part and len(part) < 1000 and Path(part).is_file():
            yield part
