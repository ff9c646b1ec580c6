"""Names of options, and suggestions for words that are not options."""

import argparse
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import rl_modules
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.foreign_names import INSTEAD, MEANT, difference, taken_by

#: Options without a group, of ``fit`` and of the commands that play or write.
GROUPS = ("model", "data", "trainer", "checkpoint")
ALONE = (
    "seed_everything",
    "ckpt_path",
    "threads",
    "resume",
    "run_name",
    "record_every",
    "print_config",
    "config",
    "help",
    "output",
    "episodes",
    "weights_only",
)
#: Options that name a class.
CLASS_OPTIONS = ("--model", "--data", "--model.class_path", "--data.class_path")
#: Options without a value.
FLAGS = ("--resume", "--help", "-h", "--print_config")
#: Options that change no result, and that a folder's name lacks.
UNNAMED = re.compile(
    r"--(config|resume|threads|record_every|run_name|ckpt_path|model|data|(model|data)\.class_path|print_config"
    r"|(trainer|checkpoint)\..*)|-.|[^-].*"
)
#: What the shell completes after a dash.
COMMON = (
    "--config",
    "--model",
    "--data",
    "--resume",
    "--ckpt_path",
    "--seed_everything",
    "--print_config",
    "--help",
    "--threads",
    "--run_name",
    "--record_every",
    "--output",
    "--episodes",
    "--model.init_from",
    "--model.learning_rate",
    "--data.env_id",
    "--data.n_envs",
    "--data.total_timesteps",
    "--trainer.accelerator",
    "--trainer.devices",
    "--trainer.logger",
    "--trainer.max_steps",
    "--trainer.precision",
)


class Parser(argparse.ArgumentParser):
    """Argparse's parser for commands with options of their own: takes no beginning of an option for the option."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses all words; one that is no option is refused with the nearest name."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = did_you_mean(unknown[0].lstrip("-").partition("=")[0], self.names())
            raise UsageError(f"{self.prog}: unknown option {unknown[0]!r}{near}")
        return given

    def error(self, message: str) -> NoReturn:
        """Raises the message as a UsageError."""
        raise UsageError(f"{self.prog}: {message}")

    def names(self) -> Iterable[str]:
        """Returns the options' names, without dashes."""
        return (option.lstrip("-") for option in self._option_string_actions)


def options_in(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yields every option of a command line: its name, its value ("": none), and its one or two words."""
    i = 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        has_word = name.startswith("-") and not equals and name not in FLAGS and i + 1 < len(words)
        if has_word and not words[i + 1].startswith("--"):
            value = words[i + 1]
        else:
            has_word = False
        yield name, value, list(words[i : i + 1 + has_word])
        i += 1 + has_word


def changed_in(words: Sequence[str]) -> str:
    """Returns what a command changes in its runs, as in ``clip_range=0.1,seed_everything=3``, in the order of names."""
    found = {name.rpartition(".")[2]: value for name, value, _ in options_in(words) if not UNNAMED.fullmatch(name)}
    return ",".join(f"{name}={value}" for name, value in sorted(found.items()))


def unknown_option(name: str, chosen: dict[str, Any] | None = None) -> str:
    """Returns the sentence for an option that does not exist, with the one that is probably meant."""
    from rl_modules.core.constructors import set_by

    if name in rl_modules.__all__ or name.endswith(".yaml"):
        return f"{name!r} is not an option; give it as --{'config' if name.endswith('.yaml') else 'model'} {name}"
    group, _, rest = name.partition(".")
    group, rest = (group, rest.removeprefix("init_args.")) if rest and group in GROUPS else ("", name)
    cls: Any = (chosen or {}).get(group)
    foreign = rest.replace("-", "_")
    if cls is not None and (instead := set_by(cls, rest)):
        return f"unknown option '{name}': {cls.__name__} sets {rest} itself; {instead}"
    if foreign in INSTEAD:
        return f"unknown option '{name}'; {INSTEAD[foreign]}"
    places = [MEANT[foreign]] if foreign in MEANT and _exists(MEANT[foreign], chosen) else []
    places = places or [
        f"{other}.{foreign}" for other in GROUPS if other != group and foreign in of_group(other, chosen)
    ]
    if places:
        return f"unknown option '{name}'; did you mean --{' or --'.join(places)}{difference(foreign)}?"
    known = of_group(group, chosen) if group else {*ALONE, *GROUPS}
    if group == "checkpoint" and rest in known:
        return f"unknown option '{name}': checkpoints are written by `rl fit`, which alone takes this option"
    near = (
        did_you_mean(rest, known) or f"; {cls.__name__ if cls else group or 'rl'} takes {', '.join(sorted(known)[:40])}"
    )
    return f"unknown option '{name}'{near}"


def _exists(place: str, chosen: dict[str, Any] | None) -> bool:
    """Returns whether the run's classes have an option, where they are known."""
    group, _, rest = place.partition(".")
    return not rest or (chosen or {}).get(group) is None or rest in of_group(group, chosen)


def of_group(group: str, chosen: dict[str, Any] | None = None) -> set[str]:
    """Returns every option of the chosen class of a group; of all its classes where none is chosen."""
    if chosen is not None and chosen.get(group) is not None:
        return arguments_of(chosen[group])
    if group == "trainer":
        from lightning import Trainer

        return arguments_of(Trainer)
    if group == "checkpoint":
        from recipes.callbacks.checkpoints import Checkpoints

        return arguments_of(Checkpoints)
    import datamodules

    package: Any = {"model": rl_modules, "data": datamodules}.get(group)
    names: set[str] = set()
    for name in package.__all__ if package is not None else ():
        # A language class whose libraries are not installed has no options to offer.
        with contextlib.suppress(ModuleNotFoundError):
            names |= arguments_of(getattr(package, name))
    return names


def arguments_of(cls: type) -> set[str]:
    """Names of the arguments of a class and of the bases that it passes ``**arguments`` to."""
    return set(taken_by(cls) or ())
