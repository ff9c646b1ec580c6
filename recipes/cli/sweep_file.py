"""Reads the file of a sweep: which arguments are searched, in which ranges, and how a trial is judged."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.core.mixins import HyperparametersMixin

from recipes import configs
from recipes.cli.options import options_in
from recipes.cli.sweep_spaces import SPACES
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.core.settings import Declared, setting

#: Kinds of ranges, and what each holds.
KINDS = {
    "uniform": "two numbers, the smaller first, as in {uniform: [0.9, 0.99]}",
    "log": "two positive numbers, the smaller first, as in {log: [1e-4, 1e-2]}",
    "int": "two whole numbers, the smaller first, as in {int: [1, 10]}",
    "log_int": "two whole numbers from 1 up, the smaller first, as in {log_int: [16, 1024]}",
    "pow2": "two powers of two, the smaller first, as in {pow2: [16, 256]}",
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


def check_configs(name: str, given: Any) -> list[str]:
    """Returns one or several configs as a list; a name that is none is reported before the first trial."""
    names = [given] if isinstance(given, str) else given
    if not names or not all(isinstance(one, str) for one in names):
        raise UsageError(
            f"{name}={given!r} must be the config whose arguments are searched, as in "
            "trpo/lunarlander.yaml, or a list of such"
        )
    for one in names:
        configs.find(one)
    return names


def check_search(name: str, given: Any) -> Any:
    """Refuses what does not map arguments to ranges."""
    if not isinstance(given, dict) or not given:
        raise UsageError(
            f"{name}={given!r} must map arguments to ranges, as in model.gamma: {{uniform: [0.9, 0.99]}}; only "
            f"{', '.join(SPACES)} have default ranges"
        )
    for argument, value in given.items():
        read_range(f"{name}.{argument}", value)
    return given


class Sweep(Declared, HyperparametersMixin):
    """A sweep; each setting is a key of its file."""

    config: Any = setting(None, "config whose arguments are searched, or a list of such", check=check_configs)
    search: Any = setting(None, "ranges of arguments, by dotted name", check=check_search)
    name: str = setting("", "of its folder in logs; empty: the config's name")
    n_trials: int = setting(50, "number of trials", least=1)
    seeds: int = setting(1, "runs of a trial, whose mean counts", least=1)
    first_seed: int = setting(1000, "of these runs", least=0)
    monitor: str = setting("eval/mean_reward", "metric of the evaluations by which a trial is pruned")
    objective: str = setting("", "metric whose last value is a run's result; empty: monitor")
    mode: str = setting("max", "whether a larger or a smaller result is better", one_of=("max", "min"))
    prune: bool = setting(True, "end a trial that is worse than the median of the others")
    startup_trials: int = setting(10, "trials before any is pruned, with settings drawn at random", least=1)
    warmup_evaluations: int = setting(2, "evaluations of a trial before it may be pruned", least=0)
    sampler_seed: int = setting(0, "of the drawn settings", least=0)
    keep_checkpoints: bool = setting(False, "keep the checkpoints of all runs")
    finalists: int = setting(0, "best trials that run again on new seeds", least=0)
    final_seeds: int = setting(10, "runs of each finalist", least=1)

    #: Options of all runs.
    arguments: list[str]

    def __post_init__(self) -> None:
        self.name = self.name or str(Path(self.config[0]).with_suffix("")).replace("/", "-").strip("-.")
        self.objective = self.objective or self.monitor
        self.ranges = {name: read_range(name, given) for name, given in self.search.items()}

    @property
    def final_seed(self) -> int:
        """The first seed of the second round, after those of the trials."""
        return self.first_seed + self.seeds

    @property
    def identity(self) -> str:
        """The settings that a resumed sweep must share, as text."""
        kept = {name: value for name, value in self.hparams.items() if name not in CHANGEABLE}
        texts = [configs.text(name) for name in self.config]
        return json.dumps({**kept, "arguments": self.arguments, "config_texts": texts}, sort_keys=True)


def read(name: str, words: list[str]) -> Sweep:
    """Reads a sweep's file; ``words`` are options of its runs, and perhaps ``--n_trials``."""
    path = configs.find(name)
    content, arguments = configs.checked(path), []
    if "model" in content:  # a config alone
        content = {"config": name}
    for option, value, own in options_in(words):
        if option == "--n_trials":
            content["n_trials"] = int(value) if value.isdigit() else value
        else:
            arguments += own
    try:
        if "search" not in content:
            content["search"] = default_space(check_configs("config", content.get("config")))
        sweep = Sweep(**content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    sweep.arguments = arguments
    for word in [*sweep.search, *arguments]:
        if (given := word.lstrip("-").partition("=")[0]) in SEEDS:
            raise UsageError(
                f"{given} can't be given: a trial runs with the seeds from first_seed={sweep.first_seed} "
                "up, as many as seeds says"
            )
    return sweep


def default_space(names: list[str]) -> dict[str, Any] | None:
    """Returns the default ranges of the algorithm that the configs name; None where it has none."""
    models = [model for name in names if (model := configs.checked(configs.find(name)).get("model"))]
    algorithm = models[-1] if models else ""
    if isinstance(algorithm, dict):
        algorithm = algorithm.get("class_path", "")
    return SPACES.get(str(algorithm).rpartition(".")[2])


def read_range(place: str, given: Any) -> Range:
    """Returns the range that a key of ``search`` describes."""
    kind, bounds = next(iter(given.items())) if isinstance(given, dict) and len(given) == 1 else ("", given)
    if kind not in KINDS:
        raise UsageError(f"{place}={given!r} must have one of the keys {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    try:
        low, high = (0.0, 0.0) if kind == "values" else map(float, bounds)  # PyYAML reads 1e-4 as text
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    fits = low <= high and not ("log" in kind and low <= 0) and not ("int" in kind and (low % 1 or high % 1))
    if kind == "pow2":  # both are 2**n where the mantissa is 0.5
        fits = 1 <= low <= high < math.inf and math.frexp(low)[0] == math.frexp(high)[0] == 0.5
    if not isinstance(bounds, list) or not bounds or not fits:
        raise UsageError(f"{place}: {kind}={bounds!r} must be {KINDS[kind]}")
    if kind == "pow2":
        return Range("values", [2**n for n in range(math.frexp(low)[1] - 1, math.frexp(high)[1])])
    return Range(kind, bounds if kind == "values" else [low, high])
