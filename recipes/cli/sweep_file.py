"""Reads the file of a sweep: which arguments are searched, in which ranges, and how a trial is judged."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from recipes import configs
from recipes.cli import config_files
from rl_modules.common.errors import UsageError, did_you_mean

#: Kinds of ranges, and what each holds.
KINDS = {
    "uniform": "two numbers, the smaller first, as in {uniform: [0.9, 0.99]}",
    "log": "two positive numbers, the smaller first, as in {log: [1e-4, 1e-2]}",
    "int": "two whole numbers, the smaller first, as in {int: [1, 10]}",
    "log_int": "two whole numbers from 1 up, the smaller first, as in {log_int: [16, 1024]}",
    "values": "a list of at least one value, as in {values: [64, 128]}",
}


#: Arguments that a sweep sets itself.
SEEDS = ("seed_everything", "data.seed", "data.init_args.seed")
#: Settings that may change when a sweep resumes.
CHANGEABLE = ("n_trials", "keep_checkpoints", "finalists", "final_seeds")


@dataclass(frozen=True)
class Range:
    """Values that an argument may take."""

    kind: str
    bounds: list[Any]

    def choose(self, trial: Any, name: str) -> str:
        """Draws a value, and returns it as a word of the command line."""
        if self.kind == "values":
            return str(trial.suggest_categorical(name, [as_word(value) for value in self.bounds]))
        if "int" in self.kind:
            return str(trial.suggest_int(name, *map(int, self.bounds), log=self.kind == "log_int"))
        return repr(trial.suggest_float(name, *self.bounds, log=self.kind == "log"))


def as_word(value: Any) -> str:
    """Returns a value of a YAML file as a word of the command line, which is read as YAML again."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass
class Sweep:
    """The settings of a sweep; each is a key of its file."""

    config: list[str]
    search: dict[str, Range]
    name: str = ""
    n_trials: int = 50
    seeds: int = 1
    first_seed: int = 1000
    monitor: str = "eval/mean_reward"
    objective: str = ""
    mode: str = "max"
    prune: bool = True
    startup_trials: int = 10
    warmup_evaluations: int = 2
    sampler_seed: int = 0
    keep_checkpoints: bool = False
    finalists: int = 0
    final_seeds: int = 10
    arguments: list[str] = field(default_factory=list)

    @property
    def final_seed(self) -> int:
        """The first seed of the second round, after those of the trials."""
        return self.first_seed + self.seeds

    @property
    def identity(self) -> str:
        """The settings that a resumed sweep must share, as text."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in CHANGEABLE}
        kept["config_texts"] = [configs.text(name) for name in self.config]
        kept["search"] = {name: [found.kind, found.bounds] for name, found in self.search.items()}
        return json.dumps(kept, sort_keys=True)


def read(name: str, words: list[str]) -> Sweep:
    """Reads a sweep's file."""
    path = configs.find(name)
    config_files.check(path)
    content = yaml.safe_load(path.read_text("utf-8"))
    known = [f.name for f in fields(Sweep) if f.name != "arguments"]
    for key in content:
        if key not in known:
            raise UsageError(f"{path}: the key {key!r} means nothing in a sweep{did_you_mean(str(key), known)}; it has "
                             f"{', '.join(known)}")  # fmt: skip
    given = content.get("config")
    names = [given] if isinstance(given, str) else given
    if not names or not all(isinstance(one, str) for one in names):
        raise UsageError(f"{path}: config={given!r} must be the config whose arguments are searched, as in "
                         "trpo/lunarlander.yaml, or a list of such")  # fmt: skip
    for one in names:
        configs.find(one)  # a mistake is reported before the first trial
    sweep = Sweep(**{**content, "config": names, "search": _ranges(path, content.get("search"))})
    _take_words(sweep, words)
    _check(path, sweep)
    sweep.name = sweep.name or str(Path(names[0]).with_suffix("")).replace("/", "-").strip("-.")
    sweep.objective = sweep.objective or sweep.monitor
    return sweep


def _take_words(sweep: Sweep, words: list[str]) -> None:
    pending = iter(words)
    for word in pending:
        option, equals, value = word.partition("=")
        if option == "--n_trials":
            value = value if equals else next(pending, "")
            if not value.isdigit():
                raise UsageError(f"--n_trials takes a whole number, as in --n_trials 50; got {value!r}")
            sweep.n_trials = int(value)
        else:
            sweep.arguments.append(word)


def _check(path: Path, sweep: Sweep) -> None:
    for one in fields(Sweep):
        value, kind = getattr(sweep, one.name), type(one.default)
        if kind in (int, str, bool) and type(value) is not kind:
            raise UsageError(f"{path}: {one.name}={value!r} must be {_ARTICLES[kind]}, as the default {one.default!r}")
    for name, least in (("n_trials", 1), ("seeds", 1), ("first_seed", 0), ("startup_trials", 1),
                        ("warmup_evaluations", 0), ("sampler_seed", 0), ("finalists", 0),
                        ("final_seeds", 1)):  # fmt: skip
        if getattr(sweep, name) < least:
            raise UsageError(f"{path}: {name}={getattr(sweep, name)} must be at least {least}")
    for word in [*sweep.search, *sweep.arguments]:
        name = word.lstrip("-").partition("=")[0]
        if name in SEEDS:
            raise UsageError(f"{name} can't be given: a trial runs with the seeds from first_seed={sweep.first_seed} "
                             "up, as many as seeds says")  # fmt: skip
    if sweep.mode not in ("max", "min"):
        raise UsageError(f"{path}: mode={sweep.mode!r} must be max or min")


_ARTICLES = {int: "a whole number", str: "text", bool: "true or false"}


def _ranges(path: Path, search: Any) -> dict[str, Range]:
    if not isinstance(search, dict) or not search:
        raise UsageError(f"{path}: search={search!r} must map arguments to ranges, as in model.learning_rate: "
                         "{log: [1e-4, 1e-2]}")  # fmt: skip
    return {str(name): _range(f"{path}: search.{name}", given) for name, given in search.items()}


def _range(place: str, given: Any) -> Range:
    if not isinstance(given, dict) or len(given) != 1 or next(iter(given)) not in KINDS:
        near = did_you_mean(str(next(iter(given))), KINDS) if isinstance(given, dict) and len(given) == 1 else ""
        raise UsageError(f"{place}={given!r} must have one of the keys {', '.join(KINDS)}{near}")
    ((kind, bounds),) = given.items()
    wrong = UsageError(f"{place}: {kind}={bounds!r} must be {KINDS[kind]}")
    if not isinstance(bounds, list) or not bounds:
        raise wrong
    if kind == "values":
        return Range(kind, bounds)
    try:
        low, high = (float(bound) for bound in bounds)  # PyYAML reads 1e-4 as text
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not low <= high or ("log" in kind and low <= 0) or ("int" in kind and (low % 1 or high % 1)):
        raise wrong
    return Range(kind, [low, high])
