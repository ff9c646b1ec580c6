"""The model's and the datamodule's class that a command line or its configs name."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import isclass
from pathlib import Path
from types import ModuleType

import lightning as L
import yaml

import datamodules
import rl_modules
from recipes.cli.options import CLASS_OPTIONS
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.extras import install
from rl_modules.common.loading import import_user_module, member_of

#: Package and base class of what each group names.
PACKAGES: dict[str, ModuleType] = {"model": rl_modules, "data": datamodules}
BASES: dict[str, type] = {"model": L.LightningModule, "data": L.LightningDataModule}


def chosen_classes(args: Sequence[str]) -> dict[str, type]:
    """Imports the classes that the arguments or their config files name; the last one of each group counts.

    The parser finds short names (``--model PPO``) among the imported classes. The others are not imported, so that a
    control task imports no language model.
    """
    found: dict[str, type] = {}
    for group, path in _named(args):
        found[group] = _resolve(group, path)
    return found


def _named(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    pending = iter(args)
    for arg in pending:
        name, equals, value = arg.partition("=")
        if name == "--config":
            for group, node in yaml.safe_load(Path(value if equals else next(pending)).read_text("utf-8")).items():
                path = node.get("class_path") if isinstance(node, dict) else node
                if group in PACKAGES and isinstance(path, str):
                    yield group, path
        elif name in CLASS_OPTIONS:
            value = value if equals else next(pending, "")
            if value and not value.startswith(("-", "{")):
                yield name[2:].partition(".")[0], value


def with_full_names(args: Sequence[str], folder: Path) -> list[str]:
    """Returns a command line in which short names of this project's classes are written in full if an imported user
    module has a class of the same name (``my_ppo.PPO``), because the parser could not choose between them.
    """
    shared = {group: _shared_names(group) for group in PACKAGES}
    if not any(shared.values()):
        return list(args)
    found: list[str] = []
    pending = iter(args)
    for arg in pending:
        name, equals, value = arg.partition("=")
        group = name[2:].partition(".")[0]
        if name not in ("--config", *CLASS_OPTIONS):
            found.append(arg)
            continue
        if not equals and (value := next(pending, "")) == "":
            found.append(arg)  # the parser asks for the value
            continue
        if name == "--config":
            value = _config_with_full_names(Path(value), shared, folder / f"{len(found)}_full.yaml")
        elif value in shared[group]:
            value = f"{PACKAGES[group].__name__}.{value}"
        found += [name, value]
    return found


def _shared_names(group: str) -> set[str]:
    """Short names that a class of this project and an imported one of the user's have."""
    package = PACKAGES[group]
    others = {cls.__name__ for cls in _subclasses(BASES[group]) if cls.__module__.split(".")[0] != package.__name__}
    return others & set(package.__all__)


def _config_with_full_names(path: Path, shared: dict[str, set[str]], copy: Path) -> str:
    config = yaml.safe_load(path.read_text("utf-8"))
    changed = False
    for group, names in shared.items():
        node = config.get(group)
        short = node.get("class_path") if isinstance(node, dict) else node
        if short not in names:
            continue
        full = f"{PACKAGES[group].__name__}.{short}"
        config[group] = {**node, "class_path": full} if isinstance(node, dict) else full
        changed = True
    if not changed:
        return str(path)
    copy.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
    return str(copy)


def _resolve(group: str, path: str) -> type:
    package = PACKAGES[group]
    module, _, name = path.rpartition(".")
    if not module or module == package.__name__:
        if name not in package.__all__:
            imported = {cls.__name__: cls for cls in _subclasses(BASES[group])}
            if not module and name in imported:
                return imported[name]
            raise UsageError(f"{group} class {name!r} is unknown; known are {', '.join(package.__all__)}"
                             f"{did_you_mean(name, package.__all__)}")  # fmt: skip
        try:
            return getattr(package, name)
        except ModuleNotFoundError as error:
            raise UsageError(f"{name} needs {error.name}, which is not installed: {install('language')}") from error
    found = member_of(import_user_module(module, f"--{group} {path}"), name, f"--{group} {path}")
    if not isclass(found) or not issubclass(found, BASES[group]):
        raise UsageError(f"--{group} {path} is no {BASES[group].__name__}; give a class such as "
                         f"{package.__name__}.{package.__all__[0]}")  # fmt: skip
    return found


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def accepts(class_path: str, name: str) -> bool:
    """Returns whether a class or one of its bases takes an argument of that name."""
    from recipes.cli.options import arguments_of

    module, _, class_name = class_path.rpartition(".")
    return name in arguments_of(getattr(import_module(module), class_name))
