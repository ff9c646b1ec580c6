"""Turns jsonargparse's error messages into one sentence: what was given, where, and the nearest known name."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.cli.options import GROUPS, refuse_word, unknown_option
from rl_modules.common.errors import did_you_mean
from rl_modules.common.loading import load_object

#: Plain names of types.
_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null",
    "list": "a list", "dict": "a mapping such as {name: value}",
}  # fmt: skip
_EXAMPLES = {"model": "PPO", "data": "RolloutDataModule"}
#: The names that Lightning's Trainer knows for an argument.
_WORDS = {
    "precision": ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"),
    "gradient_clip_algorithm": ("norm", "value"),
}


def unknown_monitor(message: str, known: Iterable[str]) -> str | None:
    """Returns the sentence for a callback whose metric a run does not log; None: it is about something else."""
    found = re.search(r"conditioned on metric `([^`]+)`", message) or re.search(r"monitor='([^']+)'\) could not find",
                                                                              message)  # fmt: skip
    if found is None:
        return None
    name, names = found.group(1), sorted(known)
    near = did_you_mean(name, names) or did_you_mean(f"train/{name}", names)
    shown = near or (f"; it logs {', '.join(names[:40])}" if names else "; it has logged nothing yet, as a run without "
                     "evaluations does")  # fmt: skip
    return f"a callback's monitor={name!r} is no metric of this run{shown}"


def one_sentence(
    message: str, chosen: Mapping[str, type] | None = None, group: str = "", checkpoint: str | None = None
) -> str:
    """Returns a parser's message as one sentence that names the argument, its value and what would be right."""
    text = " ".join(message.split())
    chosen = dict(chosen or {})
    if missing := re.search(r"arguments are required: (?:\w+\.)?(model|data)\b", text):
        return which_class(missing.group(1), checkpoint)
    key, value = _key_and_value(text)
    if key is not None and group and key.partition(".")[0] not in GROUPS:
        key = f"{group}.{key}"
    if own := _unknown(text, key or group, chosen):
        return own
    if package := re.search(r"Requirement '([\w.-]+)[^']*' not met", text):
        path = re.search(r"class_path '[\w.]*?(\w+)'", text)
        who = path.group(1) if path else key
        return f"{who} needs the package {package.group(1)}, which is not installed: pip install {package.group(1)}"
    if key is None:
        return text
    name = key.rpartition(".")[2]
    if name in _WORDS and key.startswith("trainer."):
        near = {"fp16": "16-mixed", "half": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true"}.get(str(value))
        hint = f"; did you mean {near}?" if near else did_you_mean(str(value), _WORDS[name])
        return f"{key}={value!r} is not known; it must be one of {', '.join(_WORDS[name])}{hint}"
    if needed := re.search(r"following arguments are required: ([\w., ]+)", text):
        who = _given_class(text, value).rpartition(".")[2] or key
        return f"{key}: {who} needs {needed.group(1).split(' -')[0].strip()}; give it as --{key}.init_args.NAME VALUE"
    if (known := _class_names(key)) and (given := _given_class(text, value)):
        return _class_sentence(key, given, known)
    if lacking := re.search(r"module '[\w.]+' has no attribute '(\w+)'|No module named '([\w.]+)'", text):
        nested = re.search(rf"(\w+)={{'class_path': '([\w.]*{lacking.group(1) or lacking.group(2)}[\w.]*)'", text)
        where = f"{key}.{nested.group(1)}={nested.group(2)!r}" if nested else key
        return f"{where} names no class that fits: {lacking.group(0)}"
    if key in ("model", "data"):
        return f"{key}={value!r} can't be used; it must be a class, such as {_EXAMPLES[key]}, by name or as class_path"
    wanted = "a mapping of the Trainer's arguments" if key == "trainer" else _wanted(text)
    return f"{key}={value!r} can't be used; it must be {wanted}" if wanted else f"{key}={value!r} can't be used: {text}"


def which_class(what: str, checkpoint: str | None = None) -> str:
    """Returns the sentence for a command line that names no model, or no data."""
    # The config is only named, not loaded: it names classes to import, and an untrusted checkpoint must not import
    # code.
    own = None if checkpoint is None else Path(checkpoint).parent.parent / "config.yaml"
    if own is not None and own.is_file():
        return f"no {what} is given; the settings of the checkpoint's run are in its config: add --config {own}"
    return f"no {what} is given; name one with --config (`rl list` shows the installed ones) or --{what} CLASS"


def _key_and_value(text: str) -> tuple[str | None, Any]:
    """Returns the innermost argument that a message is about, as ``model.gamma``, and its value."""
    keys = re.findall(r'Parser key "([\w.]+)"', text)
    if not keys:
        return None, None
    first, last = (re.sub(r"^(fit|validate|test|predict)\.", "", key) for key in (keys[0], keys[-1]))
    key = first if len(keys) == 1 or last == first else f"{first.partition('.')[0]}.{last}"
    key = key.replace(".init_args.", ".")
    found = re.findall(r"(?:Got value|Given value|given value|value): (.+?)(?= -|$| Given value| Expected)", text)
    value = re.findall(r"Got value: (.+?)(?= - | Given value|$)", text) or found
    return key, value[-1].strip("'\" ") if value else ""


def _unknown(text: str, key: str | None, chosen: dict[str, type]) -> str | None:
    """Returns the sentence for an option that does not exist; None where the message is about something else."""
    unknown = (
        re.search(r"Option '([\w.-]+)' is not accepted", text)
        or re.search(r"[Uu]nrecognized arguments: (-{0,2}[\w./:-]+)", text)
        or re.search(r"does not accept (?:nested )?(?:option|key) '([\w.-]+)'", text)
        or re.search(r"Key '([\w.-]+)' is not expected", text)
        or re.search(r"unknown option '([\w.]+)'", text)
    )
    if unknown is None:
        return None
    given = unknown.group(1)
    if not given.startswith("-") and "nrecognized arguments" in text:
        return refuse_word(given)
    name = re.sub(r"^(fit|validate|test|predict)\.", "", given.lstrip("-"))
    group = (key or "").partition(".")[0]
    if group in ("model", "data", "trainer") and not name.startswith(f"{group}."):
        name = f"{group}.{name}"
    group = name.partition(".")[0]
    if group in ("model", "data") and group not in chosen and "." in name:
        return f"{name} is given without a class; name the class with --{group} CLASS or --config"
    return unknown_option(name, chosen)


def _class_names(key: str) -> list[str]:
    """Names of the classes that an argument may name."""
    name = key.rpartition(".")[2]
    if name == "logger":
        from lightning.pytorch import loggers

        return sorted(loggers.__all__)
    if name == "callbacks":
        from lightning.pytorch import callbacks

        from recipes import callbacks as ours

        return sorted({*callbacks.__all__, *(name for name in ours.__all__ if name[0].isupper())})
    if name in ("optimizer", "lr_scheduler"):
        import torch

        space: Any = torch.optim if name == "optimizer" else torch.optim.lr_scheduler
        base: Any = torch.optim.Optimizer if name == "optimizer" else torch.optim.lr_scheduler.LRScheduler
        return sorted(word for word, cls in vars(space).items() if isinstance(cls, type) and issubclass(cls, base)
                      and not word.startswith("_"))  # fmt: skip
    if key == "trainer.profiler":
        return ["simple", "advanced", "pytorch"]
    return []


def _given_class(text: str, value: Any) -> str:
    """Returns the class that a message is about."""
    path = re.search(r"class_path(?:'?[:=] ?| )'([\w.]+)'", text) or re.search(r"import path string: ([\w.]+)", text)
    return (path.group(1) if path else str(value)).strip("'\"[]{} ")


def _class_sentence(key: str, given: str, known: list[str]) -> str:
    """Returns the sentence for a name that is not among the classes that fit."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", given):
        load_object(given, key)  # raises where the user's module can't be imported, or lacks the name
    near = did_you_mean(given.rpartition(".")[2], known)
    return f"{key}={given!r} names no class that fits{near or '; known are ' + ', '.join(known)}"


def _wanted(text: str) -> str:
    """Returns the types that an argument takes, in words."""
    found = re.findall(r"[Ee]xpected (?:an? )?(?:<class '([\w.]+)'>|(?:type )?(typing\.\w+\[[^\]]*\]|\w+))", text)
    names = [first or second for first, second in found]
    words = [f"{_TYPES[name]} (type {name})" for name in names if name in _TYPES]
    return " or ".join(dict.fromkeys(words))
