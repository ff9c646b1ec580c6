"""Names of options, and suggestions for words that are not options."""

import argparse
import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recipes import configs
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.foreign_names import CONTROL, INSTEAD, MEANT, difference

#: Options without a group, of ``fit`` and of the commands that play or write.
GROUPS = ("model", "data", "trainer", "checkpoint")
ALONE = ("seed_everything", "ckpt_path", "threads", "resume", "record_every", "print_config", "config", "help",
         "output", "episodes", "weights_only")  # fmt: skip
#: Options that name a class.
CLASS_OPTIONS = ("--model", "--data", "--model.class_path", "--data.class_path")
#: Options without a value.
FLAGS = ("--resume", "--help", "-h", "--print_config")
#: What the shell completes after a dash.
COMMON = (
    "--config", "--model", "--data", "--resume", "--ckpt_path", "--seed_everything", "--print_config", "--help",
    "--threads", "--record_every", "--output", "--episodes", "--model.init_from", "--model.learning_rate",
    "--data.env_id", "--data.n_envs", "--data.total_timesteps", "--trainer.accelerator", "--trainer.devices",
    "--trainer.logger", "--trainer.max_steps", "--trainer.precision",
)  # fmt: skip
#: Options of other programs, and their equivalents here.
ELSEWHERE = {"total_timesteps": "trainer.max_steps", "max_steps": "data.total_timesteps"}


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


def refuse_word(word: str) -> str:
    """Returns the sentence for a word that is no option and belongs to none."""
    import rl_modules

    if word in rl_modules.__all__:
        return f"{word!r} is not an option; a class is given as --model {word}"
    name = word if word in configs.names() else f"{word}.yaml"
    if name in configs.names() or Path(word).suffix in (".yaml", ".yml"):
        return f"{word!r} is not an option; a config is given as --config {word}"
    return f"{word!r} is not an option; options begin with --, and their value follows after a space"


def unknown_option(name: str, chosen: dict[str, Any] | None = None) -> str:
    """Returns the sentence for an option that does not exist."""
    group, _, rest = name.partition(".")
    rest = rest.removeprefix("init_args.")
    if not rest or group not in GROUPS:
        return f"unknown option --{name}{_meant(name.replace('-', '_'), chosen)}; `rl fit --help` lists all"
    known = of_group(group, chosen)
    owner = getattr((chosen or {}).get(group), "__name__", group)
    fixed = getattr((chosen or {}).get(group), "fixed_settings", {})
    if rest in fixed:
        return f"unknown option '{name}': {owner} sets {rest} itself; {fixed[rest]}"
    if rest in known and group == "checkpoint":
        return f"unknown option '{name}': checkpoints are written by `rl fit`, which alone takes this option"
    foreign = rest.replace("-", "_")
    if foreign in INSTEAD:
        return f"unknown option '{name}'; {INSTEAD[foreign]}"
    if (meant := MEANT.get(foreign)) and _exists(meant, chosen):
        return f"unknown option '{name}'; did you mean --{meant}{difference(foreign)}?"
    places = [place for place in places_of(rest, chosen) if not place.startswith(f"{group}.")]
    if not places and rest in ELSEWHERE and rest not in known:
        places = [ELSEWHERE[rest]]
    if not places and (near := did_you_mean(rest, known)):
        return f"unknown option '{name}'{near}"
    if places:
        return f"unknown option '{name}'; did you mean --{' or --'.join(places)}?"
    return f"unknown option '{name}': {owner} has no {rest!r}; it takes {', '.join(sorted(known)[:40])}"


def _exists(place: str, chosen: dict[str, Any] | None) -> bool:
    """Returns whether the run's classes have an option, where they are known."""
    group, _, rest = place.partition(".")
    return not rest or (chosen or {}).get(group) is None or rest in of_group(group, chosen)


def _meant(name: str, chosen: dict[str, Any] | None = None) -> str:
    """Returns a clause with the option that a name without a group probably means."""
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    is_of_language = name in CONTROL and (chosen or {}).get("model") is not None
    if name in MEANT and _exists(MEANT[name], chosen) and (is_of_language or name not in CONTROL):
        return f"; did you mean --{MEANT[name]}{difference(name)}?"
    near = did_you_mean(name, [*ALONE, *GROUPS])
    if places := places_of(name):
        return f"; did you mean --{' or --'.join(places)}?"
    return near.replace("did you mean ", "did you mean --").replace(" or ", " or --")


def places_of(name: str, chosen: dict[str, Any] | None = None) -> list[str]:
    """Returns the full names of the options whose last part is ``name``."""
    return [f"{group}.{name}" for group in GROUPS if name in of_group(group, chosen)]


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
    import rl_modules

    package: Any = {"model": rl_modules, "data": datamodules}.get(group)
    names: set[str] = set()
    for name in package.__all__ if package is not None else ():
        # A language class whose libraries are not installed has no options to offer.
        with contextlib.suppress(ModuleNotFoundError):
            names |= arguments_of(getattr(package, name))
    return names


def arguments_of(cls: type) -> set[str]:
    """Names of the arguments of a class and its bases, which take what the class passes on as ``**arguments``."""
    bases = [base for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    names: set[str] = set()
    for base in bases:
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        names |= {name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return names - {"self"}


def refuse_keys(path: Path, keys: set[str]) -> None:
    """Refuses unknown keys at the first level of a config file."""
    for key in sorted(keys - {*GROUPS, *ALONE}):
        if near := did_you_mean(key, GROUPS):
            raise UsageError(f"{path}: the key {key!r} means nothing{near}")
        places = [MEANT[key]] if key in MEANT else places_of(key)
        if key in INSTEAD:
            raise UsageError(f"{path}: the key {key!r} means nothing; {INSTEAD[key]}")
        where = f"; it belongs under {' or '.join(_as_yaml(place) for place in places)}" if places else (
            f"; a config has {', '.join(GROUPS[:3])} and {', '.join(ALONE[:5])}")  # fmt: skip
        raise UsageError(f"{path}: the key {key!r} means nothing at the first level{where}")


def _as_yaml(place: str) -> str:
    group, _, rest = place.partition(".")
    return f"{group}.init_args.{rest}" if group in ("model", "data") and rest else place
