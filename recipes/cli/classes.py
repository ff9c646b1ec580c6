"""The classes of model and data that a command line or its configs name, and the values that are given to them."""

import inspect
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import torch
import yaml
from jsonargparse._loaders_dumpers import yaml_load

import datamodules
import rl_modules
from recipes.callbacks.checkpoints import Checkpoints
from recipes.cli.options import ALONE, CLASS_OPTIONS, GROUPS, arguments_of, options_in, unknown_option
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.extras import install
from rl_modules.common.foreign_names import CLASSES
from rl_modules.common.loading import import_user_module, load_object, member_of
from rl_modules.core.settings import Setting

#: Package and base class of what each group names.
PACKAGES: dict[str, ModuleType] = {"model": rl_modules, "data": datamodules}
BASES: dict[str, type] = {"model": L.LightningModule, "data": L.LightningDataModule}
#: Keys of the first level of a config that only ``fit`` reads.
OF_FIT = ("checkpoint", "record_every", "resume", "run_name")
#: Arguments that name classes, perhaps a user's.
NAMES_CLASSES = ("logger", "callbacks", "optimizer", "lr_scheduler", "profiler", "strategy", "plugins")
_NUMBERS = {int, float, bool, str, type(None)}


# ---------------------------------------------------------------- the classes


def chosen_classes(args: Sequence[str]) -> dict[str, type]:
    """Imports the classes that arguments or configs name, by group, the last of each, so that the parser finds them."""
    return {group: _resolve(group, path) for group, path in _named(args)}


def _named(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, value, _ in options_in(args):
        if name == "--config":
            for group, node in yaml.safe_load(Path(value).read_text("utf-8")).items():
                path = node.get("class_path") if isinstance(node, dict) else node
                if group in PACKAGES and isinstance(path, str):
                    yield group, path
        elif name in CLASS_OPTIONS and value and not value.startswith(("-", "{")):
            yield name[2:].partition(".")[0], value


def _resolve(group: str, path: str) -> type:
    package = PACKAGES[group]
    module, _, name = path.rpartition(".")
    if not module or module == package.__name__:
        if name not in package.__all__:
            imported = {cls.__name__: cls for cls in _subclasses(BASES[group])}
            if not module and name in imported:
                return imported[name]
            if name in CLASSES:
                raise UsageError(f"{group} class {name!r} is not here; {CLASSES[name]}")
            raise UsageError(
                f"{group} class {name!r} is unknown; known are {', '.join(package.__all__)}"
                f"{did_you_mean(name, package.__all__)}"
            )
        try:
            return getattr(package, name)
        except ModuleNotFoundError as error:
            raise UsageError(f"{name} needs {error.name}, which is not installed: {install('language')}") from error
    found = member_of(import_user_module(module, f"--{group} {path}"), name, f"--{group} {path}")
    if not inspect.isclass(found) or not issubclass(found, BASES[group]):
        raise UsageError(
            f"--{group} {path} is no {BASES[group].__name__}; give a class such as "
            f"{package.__name__}.{package.__all__[0]}"
        )
    return found


def known_classes(argument: str) -> list[str]:
    """Returns the names of classes that an argument takes without their module; none where any text may be right."""
    bases: dict[str, list[type]] = {
        "callbacks": [L.Callback],
        "optimizer": [torch.optim.Optimizer],
        "lr_scheduler": [torch.optim.lr_scheduler.LRScheduler],
    }
    found = [cls for base in bases.get(argument, ()) for cls in _subclasses(base) if not cls.__name__.startswith("_")]
    # Libraries that are imported have others, which a name alone does not mean.
    return sorted({cls.__name__ for cls in found if cls.__module__.startswith(("torch.", "lightning.", "recipes."))})


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


# ---------------------------------------------------------------- their arguments


def declared_arguments(cls: Any) -> Mapping[str, Setting]:
    """The arguments of a class as settings: as it declares them, or by the annotations of its constructor."""
    if declared := getattr(cls, "declared_settings", None):
        return declared
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: Setting(p.default, "").of_kind(p.annotation) for p in parameters}


def refuse_given(command: str, args: Sequence[str], chosen: Mapping[str, type], message: str) -> typing.NoReturn:
    """Raises what the run's classes say of a command line that the parser refused, or else the parser's message."""
    owners = {"trainer": L.Trainer, **({"checkpoint": Checkpoints} if command == "fit" else {}), **chosen}
    for place, value in _given(args):
        group, _, rest = place.partition(".")
        name, _, deeper = rest.removeprefix("init_args.").partition(".")
        if group in PACKAGES and group not in chosen:
            raise UsageError(which_class(group))
        if group in owners and name in ("class_path", "init_args", "dict_kwargs"):
            continue
        if place not in (*GROUPS, *ALONE) and not (group in owners and name in arguments_of(owners[group])):
            raise UsageError(unknown_option(place, dict(chosen)))
        for part in value if name in NAMES_CLASSES and isinstance(value, list) else [value]:
            path = part.get("class_path") if isinstance(part, dict) else part
            known = known_classes(name)
            if name in NAMES_CLASSES and isinstance(path, str) and ("." in path or (known and path not in known)):
                load_object(path, place, known)  # raises what is wrong in the name, or in the user's file
        setting = declared_arguments(owners[group]).get(name) if name and not deeper else None
        if setting is not None and ({*setting.kinds} <= _NUMBERS or setting.check is not None):
            setting.checked(place.replace(".init_args", ""), value)
    if missing := next((group for group in PACKAGES if group not in chosen), None):
        raise UsageError(
            which_class(missing, next((x for name, x, _ in options_in(args) if name == "--ckpt_path"), None))
        )
    raise UsageError(" ".join(message.split())[:600])


def _given(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields every value that configs and options give, by its place, such as ``model.gamma``."""
    for option, text, _ in options_in(args):
        if option != "--config":
            yield option.lstrip("-").removesuffix("+"), _parsed(text)
    for path in (text for option, text, _ in options_in(args) if option == "--config"):
        for key, node in yaml_load(Path(path).read_text("utf-8")).items():
            own = node if key not in PACKAGES else {}
            arguments = node.get("init_args", own) if isinstance(node, dict) and key in GROUPS else {}
            arguments = arguments if isinstance(arguments, dict) else {}
            yield from ((f"{key}.{name}", value) for name, value in arguments.items())
            if not arguments:
                yield key, node


def _parsed(text: str) -> Any:
    try:
        return yaml_load(text)
    except yaml.YAMLError:
        return text


def which_class(what: str, checkpoint: str | None = None) -> str:
    """Returns the sentence for a command line that names no ``model``, or no ``data``."""
    # The config is only named, not loaded: it names classes to import, and an untrusted checkpoint must not import
    # code.
    own = None if checkpoint is None else Path(checkpoint).parent.parent / "config.yaml"
    if own is not None and own.is_file():
        return f"no {what} is given; the settings of the checkpoint's run are in its config: add --config {own}"
    return f"no {what} is given; name one with --config (`rl list` shows the installed ones) or --{what} CLASS"


# ---------------------------------------------------------------- what the parser reads


class _Dumper(yaml.SafeDumper):
    """Writes every text in quotes: the parser reads more of them as numbers than PyYAML."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def prepared(args: Sequence[str], command: str, classes: Iterable[type], folder: Path) -> list[str]:
    """Returns a command line as the parser takes it. Copies of the configs that change are written into ``folder``.

    Short names of this project's classes are written in full, because a user's class may have the same one. ``1e6``
    becomes an int for an argument that is one. Evaluations do without the keys that only ``fit`` reads: a run records
    its whole config, and evaluations of it take that file.
    """
    makers = {vars(base).get("__init__", object) for cls in [*classes, L.Trainer] for base in cls.__mro__} - {object}
    whole = {p.name for make in makers for p in inspect.signature(make).parameters.values() if _is_whole(p.annotation)}
    found: list[str] = []
    for name, value, words in options_in(args):
        if name == "--config":
            config = yaml_load(Path(value).read_text("utf-8"))
            changed = _as_parsed(config, command, whole)
            if changed != config or repr(changed) != repr(config):
                copy = folder / f"{len(found)}_{Path(value).name}"
                copy.write_text(yaml.dump(changed, Dumper=_Dumper, sort_keys=False, allow_unicode=True), "utf-8")
                words = [name, str(copy)]
        elif name in CLASS_OPTIONS:
            full = _full_name(name[2:].partition(".")[0], value)
            words = [name, full] if full != value else words
        elif value and name.startswith("--") and name.rpartition(".")[2].lstrip("-") in whole:
            words = [f"{name}={_written_out(value)}"]
        found += words
    return found


def _as_parsed(config: dict[str, Any], command: str, whole: set[str]) -> dict[str, Any]:
    found = {key: node for key, node in config.items() if command == "fit" or key not in OF_FIT}
    for group in PACKAGES.keys() & found.keys():
        node = found[group]
        if isinstance(node, dict) and "class_path" in node:
            found[group] = {**node, "class_path": _full_name(group, node["class_path"])}
        else:
            found[group] = _full_name(group, node)
    return _converted(found, whole)


def _full_name(group: str, name: Any) -> Any:
    package = PACKAGES[group]
    return f"{package.__name__}.{name}" if isinstance(name, str) and name in package.__all__ else name


def _is_whole(annotation: Any) -> bool:
    kinds = typing.get_args(annotation)
    return annotation is int or (int in kinds and not {float, str, bool} & set(kinds))


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
