"""``rl fit --help``: the arguments of the chosen model and datamodule first, on one screen."""

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any

#: Lines of the whole text, and characters of a line.
LINES, WIDTH = 60, 120

_TRAINER = {
    "trainer.accelerator": "cpu, gpu or auto", "trainer.devices": "processes, or GPUs",
    "trainer.max_steps": "optimizer steps after which training ends", "trainer.precision": "32-true, bf16-mixed …",
    "trainer.logger": "TensorBoardLogger, CSVLogger, WandbLogger, or false", "trainer.default_root_dir":
    "folder of the logs", "seed_everything": "seed of everything random", "threads": "CPU threads of torch",
    "resume": "resume the newest run of this model on this data", "record_every": "transitions between two videos",
}  # fmt: skip


def short_help(command: str, chosen: Mapping[str, type]) -> str:
    """Returns the arguments of the run's classes, one line each, and the most used ones of the Trainer."""
    head = [
        f"usage: rl {command} --config NAME [--model.X VALUE] [--data.X VALUE] [--trainer.X VALUE]",
        f"       rl {command} --help all lists every option, with all of Lightning's",
    ]
    trainer = ["", "trainer and run", *(_line(name, "", text) for name, text in _TRAINER.items())]
    left = LINES - len(head) - len(trainer)
    parts: list[str] = []
    for i, (group, cls) in enumerate(chosen.items()):
        parts += _section(group, cls, left // 2 if i == 0 else left - len(parts))
    return "\n".join([*head, *parts, *trainer])


def _section(group: str, cls: type, lines: int) -> list[str]:
    """Returns the arguments of a class, its own first; those for which there is no line are named."""
    rows = [(name, default, text) for name, (default, text) in arguments(cls).items()]
    summary = (inspect.getdoc(cls) or cls.__name__).partition("\n")[0]
    title = ["", f"{group}: {cls.__name__}, {summary}"[:WIDTH]]
    room = lines - len(title)
    if len(rows) <= room:
        return title + [_line(f"{group}.{name}", default, text) for name, default, text in rows]
    rest = [name for name, _, _ in rows]
    shown = room
    while True:
        names = textwrap.wrap(f"also: {', '.join(rest[shown:])}", WIDTH - 2, break_on_hyphens=False)
        if shown + len(names) <= room:
            break
        shown -= 1
    listed = [_line(f"{group}.{name}", default, text) for name, default, text in rows[:shown]]
    return title + listed + [f"  {line}" for line in names]


def arguments(cls: type) -> dict[str, tuple[str, str]]:
    """Default and description of every argument of a class, then of the bases that it passes the rest on to."""
    found: dict[str, tuple[str, str]] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        described = _descriptions(cls) | _descriptions(base) | _descriptions(cls)
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        for p in parameters:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in found and p.name != "description":
                default = "" if p.default is p.empty or p.default is None else str(p.default)
                found[p.name] = (default, described.get(p.name, ""))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _descriptions(cls: Any) -> dict[str, str]:
    """Returns the ``Args`` entries in the docstrings of a class and its bases, by name."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = re.search(r"\n *Args:\n(.*?)(?:\n\n|\Z)", vars(base).get("__doc__") or "", re.DOTALL)
        if section is not None:
            body = textwrap.dedent(section.group(1))
            for name, text in re.findall(r"^(\w+): (.*?)(?=^\*{0,2}\w+: |\Z)", body, re.DOTALL | re.MULTILINE):
                texts[name] = " ".join(text.split())
    return texts


def _line(name: str, default: str, text: str) -> str:
    left = f"  --{name}{f' {default}' if default else ''}"
    line = f"{left:42} {text}"
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
