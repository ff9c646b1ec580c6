"""Several sources of records in one run: tasks, files and datasets with weights, each with its own reward functions."""

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.language.on_demand import load_records
from datamodules.language.reward_arguments import LOGGING, parameters_of
from datamodules.language.reward_calls import function_name
from datamodules.language.rewards import RewardFunction, load_reward_func
from datamodules.language.sources import EndlessOrder
from datamodules.language.tasks import Task, make_task
from datamodules.language.tasks.answers import voted_answer
from datamodules.language.tasks.base import Record
from rl_modules.common.errors import UsageError, real_number
from rl_modules.common.loading import require_settings
from rl_modules.common.seeding import stream_seed

#: Column with the name of a record's source, which reward functions get, too.
SOURCE = "data_source"
#: Positions of the stream in which each source has its exact share.
BLOCK = 1024


@dataclass
class Source:
    """One entry of ``task: [{name: addition, weight: 2}, {path: more.jsonl, reward_funcs: exact_answer}]``."""

    name: str = ""
    weight: float = 1
    task: Any = None
    task_kwargs: dict[str, Any] | None = None
    path: str | None = None
    eval_path: str | None = None
    dataset: Any = None
    n_train: int | None = None
    n_eval: int | None = None
    reward_funcs: Any = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    eval_split: str = "test"
    columns: dict[str, str] | None = None
    answer_after: str | None = None
    rewards: list[RewardFunction] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, entry: Any, seed: int) -> "Source":
        """Checks an entry, and makes its task and reward functions."""
        what = f"task: the source {entry!r}"
        if not isinstance(entry, Mapping):
            raise UsageError(f"{what} should be a dictionary such as {{name: addition, weight: 2}}")
        require_settings(cls, dict(entry), what)
        self = cls(**entry)
        if self.task is self.path is self.dataset is None and self.name:
            self.task = self.name
        given = [x for x in (self.task, self.path, self.dataset) if x is not None]
        if len(given) != 1:
            raise UsageError(f"{what} should have exactly one of task, path and dataset")
        self.name = str(self.name or Path(str(given[0])).stem)
        if not 0 < real_number("weight", self.weight) < math.inf:
            raise UsageError(f"{what}: weight={self.weight!r} must be a number above 0")
        if self.task is not None:
            self.task = make_task(self.task, **{"seed": seed, **(self.task_kwargs or {})})
        specs = self.reward_funcs or (self.task.reward_funcs if self.task is not None else [])
        specs = specs if isinstance(specs, list) else [specs]
        self.rewards = [of_source(load_reward_func(spec, self.task), self.name) for spec in specs]
        return self

    def load(self, split: str, n: int | None, seed: int, **checks: Any) -> list[Record]:
        """Returns the source's records of a split; none of ``test`` where a file has no ``eval_path``."""
        place: dict[str, Any] = {"task": self.task, "path": self.path, "dataset": self.dataset}
        part, own = self.dataset_split, self.n_train
        if split != "train":
            part, own = self.eval_split, self.n_eval
            if self.eval_path is not None:
                place = {"path": self.eval_path}
            elif self.path is not None:
                return []
        records = load_records(
            **place,
            dataset_config=self.dataset_config,
            columns=self.columns,
            answer_after=self.answer_after,
            dataset_split=part,
            split=split,
            n=own or n,
            seed=seed,
            **{**checks, "at_most": checks.get("at_most", False) and own is None},
        )
        for record in records:
            record[SOURCE] = self.name
        return list(records)


class Mixture(Task):
    """Several sources as one task. A record's column ``data_source`` names its source."""

    name, is_mixture = "mixture", True

    def __init__(self, entries: Sequence[Any], seed: int = 0) -> None:
        super().__init__(seed)
        self.sources = {source.name: source for source in (Source.of(entry, seed) for entry in entries)}
        if len(self.sources) < len(entries) or not entries:
            raise UsageError(f"task={entries!r} should be one source or more, of different names; give each a name")

    def load(self, split: str, n: int | None, **checks: Any) -> list[Record]:
        """Returns the records of all sources; ``n`` of them are divided by weight, those of ``test`` equally."""
        weights = [source.weight if split == "train" else 1.0 for source in self.sources.values()]
        parts = [None] * len(weights) if n is None else shares(weights, n)
        found = [
            source.load(split, part, self.seed, **checks)
            for source, part in zip(self.sources.values(), parts, strict=True)
        ]
        if n != 0 and not any(found):
            raise UsageError("task: no source has held-out records; give one an eval_path, or set eval_steps=0")
        return [record for records in found for record in records]

    def records(self, split: str, n: int | None) -> list[Record]:
        return self.load(split, n)

    @property
    def weights(self) -> dict[str, float]:
        """The sources' weights by name."""
        return {name: float(source.weight) for name, source in self.sources.items()}

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        return [func for source in self.sources.values() for func in source.rewards]

    def first_reward(self, records: Sequence[Record], rewards: Tensor) -> Tensor:
        """Returns the first reward of each completion's source (else the first of all), of rewards [B, F]: [B]."""
        first, end = dict[str, int](), 0
        for name, source in self.sources.items():
            if source.rewards:
                first[name], end = end, end + len(source.rewards)
        columns = [min(first.get(record.get(SOURCE, ""), end), rewards.shape[1] - 1) for record in records]
        return rewards.gather(1, torch.tensor(columns).unsqueeze(1)).squeeze(1)

    def require_rewards(self, names: Sequence[str]) -> None:
        """Refuses names of evaluation sets to which no reward function of a source applies."""
        for name in names:
            if name not in self.sources:
                raise UsageError(
                    f"eval_path: no reward function applies to the set {name!r}; give it the name of a "
                    f"source ({', '.join(self.sources)}), or give reward_funcs, for all"
                )

    def judged(
        self, records: Sequence[Record], texts: Sequence[str], rewards: Tensor
    ) -> tuple[list[str | None], Tensor | None]:
        """Returns the completions' answers, and :meth:`first_reward`."""
        first = self.first_reward(records, rewards) if rewards.shape[1] else None
        return list(map(self.answer_of, records, texts)), first

    def answer_of(self, record: Record, text: str) -> str | None:
        """Returns a completion's final answer for a majority vote."""
        source = self.sources.get(record.get(SOURCE, ""))
        if source is None or source.task is None:
            return voted_answer(text, None if source is None else source.answer_after)
        return source.task.extract(text)


def task_of(given: Any, seed: int, settings: Mapping[str, Any] | None = None) -> Task:
    """Returns the task of the argument ``task``: a list is a mixture of sources."""
    if not isinstance(given, list | tuple):
        return make_task(given, **{"seed": seed, **(settings or {})})
    if settings:
        raise UsageError(f"task: the settings {', '.join(settings)} belong to a source, as its task_kwargs")
    return Mixture(given, seed)


def held_out(paths: Mapping[str, str], n: int, **how: Any) -> list[Record]:
    """Returns the records of several named evaluation sets, at most ``n`` of each."""
    found = [(name, record) for name, path in paths.items() for record in load_records(path=path, n=n, **how)]
    return [{**record, SOURCE: name} for name, record in found]


def of_source(func: RewardFunction, source: str) -> RewardFunction:
    """Returns a reward function that scores the completions of one source's prompts, and gives None to others."""

    def call(**columns: Any) -> Any:
        names = columns[SOURCE]
        own = [i for i, name in enumerate(names) if name == source]

        def everywhere(values: Any) -> Any:
            if len(values) != len(own):
                return values  # which the caller refuses
            found = dict(zip(own, values, strict=True))
            return [found.get(i) for i in range(len(names))]

        async def later(values: Any) -> Any:
            return everywhere(await values)

        if not own:
            return [None] * len(names)
        part = {key: [value[i] for i in own] if isinstance(value, list) else value for key, value in columns.items()}
        if (log := columns.get(LOGGING[1])) is not None:
            part[LOGGING[1]] = lambda column, values: log(column, everywhere(list(values)))
        if not takes_source:
            del part[SOURCE]
        values = func(**part)
        return later(values) if inspect.isawaitable(values) else everywhere(values)

    parameters = parameters_of(func)
    takes_source = SOURCE in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    further = [] if takes_source else [inspect.Parameter(SOURCE, inspect.Parameter.KEYWORD_ONLY)]
    call.__signature__ = inspect.Signature([*parameters.values(), *further])  # type: ignore[attr-defined]
    call.__doc__, call.__name__ = func.__doc__, f"{source}.{function_name(func)}"
    return call


def by_source(
    records: Sequence[Record], sources: Sequence[str], names: Sequence[str], rewards: Tensor, correct: Tensor | None
) -> dict[str, tuple[float, int]]:
    """Means and weights by source: ``<source>/pass@1`` of ``correct`` [B], and shared functions' rewards [B, F]."""
    found: dict[str, tuple[float, int]] = {}
    for source in sources:
        rows = [i for i, record in enumerate(records) if record.get(SOURCE) == source]
        if rows and correct is not None:
            found[f"{source}/pass@1"] = float(correct[rows].float().mean()), len(rows)
        for name, column in zip(names, rewards[rows].unbind(1), strict=True) if rows else ():
            counts = ~column.isnan()
            if not name.startswith(f"{source}.") and bool(counts.any()):
                found[f"{source}/rewards/{name}"] = float(column[counts].mean()), int(counts.sum())
    return found


# ---------------------------------------------------------------- order


def shares(weights: Sequence[float], n: int) -> list[int]:
    """Divides n by weight, by largest remainders."""
    exact = [n * weight / math.fsum(weights) for weight in weights]
    whole = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: n - sum(whole)]:
        whole[i] += 1
    return whole


class MixedOrder(EndlessOrder):
    """A stream in which each source has its share of 1,024 positions, by the weights of ``segments``."""

    def __init__(
        self, seed: int, records: Sequence[Record], weights: dict[str, float], segments: Callable[[], list[Any]]
    ) -> None:
        super().__init__(seed)
        self._numbers: dict[str, list[int]] = {name: [] for name in weights}
        for number, record in enumerate(records):
            self._numbers[record[SOURCE]].append(number)
        if empty := [name for name, numbers in self._numbers.items() if not numbers]:
            raise UsageError(f"task: the source {empty[0]!r} has no training records")
        self._orders = {name: EndlessOrder(stream_seed(seed, 0, f"source {name}")) for name in weights}
        self._first: list[Any] = [0, dict.fromkeys(weights, 0), weights]
        self._segments = segments
        self._blocks: dict[Any, list[str]] = {}

    def at(self, position: int, n: int) -> int:
        name, taken = self._taken(position)
        numbers = self._numbers[name]
        return numbers[self._orders[name].at(taken[name], len(numbers))]

    def reweighed(self, position: int, weights: dict[str, float]) -> list[Any]:
        """Returns the segment that begins at a position."""
        return [position, self._taken(position)[1], weights]

    def _taken(self, position: int) -> tuple[str, dict[str, int]]:
        """The source at a position, and how many records of each source are before it."""
        past = [segment for segment in self._segments() if segment[0] <= position]
        start, before, weights = past[-1] if past else self._first
        block, within = divmod(position - start, BLOCK)
        counts = dict(zip(weights, shares(list(weights.values()), BLOCK), strict=True))
        key = (start, block)
        if key not in self._blocks:
            names = [name for name, count in counts.items() for _ in range(count)]
            random.Random(stream_seed(self._seed, 0, "mixture", start + block)).shuffle(names)
            # Replaced, because a thread that writes ahead may read it.
            self._blocks = {k: v for k, v in self._blocks.items() if k[1] >= block - 1 and k[0] <= start} | {key: names}
        names = self._blocks[key]
        head = names[:within]
        return names[within], {name: before[name] + block * counts[name] + head.count(name) for name in weights}
