"""Reads the file of a sweep: which arguments are searched, in which ranges, and how a trial is judged."""

import json
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.core.mixins import HyperparametersMixin

from recipes import configs
from recipes.cli.options import options_in
from recipes.cli.sweep_spaces import SPACES
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.extras import install
from rl_modules.core.settings import Declared, setting

try:
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
except ModuleNotFoundError as missing:
    raise UsageError(f"rl sweep needs {missing.name}, which is not installed: {install('sweep')}") from missing

#: Arguments that a sweep sets itself.
SEEDS = ("seed_everything", "data.seed", "data.init_args.seed")
#: Settings that may change when a sweep resumes.
CHANGEABLE = ("n_trials", "keep_checkpoints", "finalists", "final_seeds")


def as_word(value: Any) -> str:
    """Returns a value of a YAML file as a word of the command line, which is read as YAML again."""
    return value if isinstance(value, str) else json.dumps(value)


def exponent(value: Any) -> int:
    """Returns n of 2**n."""
    if (n := operator.index(value)) < 1 or n & (n - 1):
        raise ValueError
    return n.bit_length() - 1


#: Kinds of ranges: how a bound is read, Optuna's distribution of the bounds, and what a range holds.
KINDS: dict[str, tuple[Callable[[Any], Any], Callable[..., BaseDistribution], str]] = {
    "uniform": (float, FloatDistribution, "two numbers, the smaller first: [0.9, 0.99]"),
    "log": (
        float,
        partial(FloatDistribution, log=True),
        "two positive numbers, the smaller first: [1e-4, 1e-2]",
    ),
    "int": (operator.index, IntDistribution, "two whole numbers, the smaller first: [1, 10]"),
    "log_int": (
        operator.index,
        partial(IntDistribution, log=True),
        "two whole numbers from 1 up: [16, 1024]",
    ),
    "pow2": (
        exponent,
        lambda low, high: CategoricalDistribution([str(2**n) for n in range(low, high + 1)]),
        "two powers of two, the smaller first: [16, 256]",
    ),
    "values": (
        as_word,
        lambda *values: CategoricalDistribution(values),
        "a list of at least one value: [64]",
    ),
}


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


def read_range(place: str, given: Any) -> BaseDistribution:
    """Returns the distribution that a key of ``search`` describes."""
    kind, bounds = next(iter(given.items())) if isinstance(given, dict) and len(given) == 1 else ("", given)
    if kind not in KINDS:
        raise UsageError(f"{place}={given!r} must have one of the keys {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    bound, distribution, what = KINDS[kind]
    try:  # PyYAML reads 1e-4 as text
        return distribution(*map(bound, bounds if isinstance(bounds, list) else []))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{place}: {kind}={bounds!r} must be {what}") from error
