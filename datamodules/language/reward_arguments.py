"""One call of a reward function: the arguments that it gets, what it logs in TRL's form, the values that it returns."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from datamodules.language.messages import valid_text
from rl_modules.common.errors import UsageError

if TYPE_CHECKING:
    from lightning import Trainer


Parameters = Mapping[str, inspect.Parameter]
#: Arguments by which a reward function logs.
LOGGING = ("log_metric", "log_extra")
#: Argument for the prompts as the model reads them, after the chat template; only for functions that name it.
RENDERED = "rendered_prompts"
#: Arguments that have no value per completion.
SHARED = frozenset({"trainer_state", *LOGGING})
#: Arguments that are no columns.
_OWN = frozenset({"prompts", "completions", "completion_ids", RENDERED, *SHARED})
#: Columns that a reward function gets by other names, or not at all (TRL's choice).
_NOT_PASSED = frozenset(
    {
        "prompt",
        "completion",
        "completion_ids",
        "prompt_ids",
        "conversation",
        "text_ids",
        "completion_mask",
        "image_texts",
    }
)


def columns_of(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The records' columns as reward functions get them, None where a record lacks one; refuses those with the name of
    an argument, whose value they would replace.
    """
    names = dict.fromkeys(name for record in records for name in record if name not in _NOT_PASSED)
    for name in _OWN.intersection(names):
        raise UsageError(
            f"the records have a column {name!r}, the name by which reward functions get this run's own "
            f"{name}; rename or remove the column in the file or dataset"
        )
    return {name: [record.get(name) for record in records] for name in names}


def parameters_of(func: Callable[..., Any]) -> Parameters:
    """A function's parameters; of a builtin written in C, which has no signature, ``**columns``."""
    try:
        return dict(inspect.signature(func).parameters)  # which pickles, as for ranks that are spawned
    except (TypeError, ValueError):
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}


def accepted(parameters: Parameters, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The part of ``given`` that a function accepts: what it names, and all columns if it has ``**columns``."""
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and parameter.name not in given:
            columns = [key for key in given if key not in _OWN]
            raise UsageError(
                f"reward function {name!r} needs a column {parameter.name!r}, but the records have only "
                f"{', '.join(columns) or 'prompts'}; map one with columns"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {
        key: value
        for key, value in given.items()
        if key in parameters or (takes_all and key not in (*LOGGING, RENDERED))
    }


def copied(value: Any) -> Any:
    """A copy of lists and dictionaries, because a function may change what it gets."""
    if isinstance(value, list):
        # Lists of numbers and strings, such as token ids, are copied without a check of each element.
        return [copied(x) if isinstance(x, (list, dict)) else x for x in value]
    if isinstance(value, dict):
        return {key: copied(x) for key, x in value.items()}
    return value


# ---------------------------------------------------------------- TRL's log_metric and log_extra


@dataclass
class RewardLog:
    """Values that one call of a reward function logs about ``count`` completions, of which ``start`` is the first."""

    start: int
    count: int
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: list[tuple[str, list[Any]]] = field(default_factory=list)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to a curve; each counts as often as the call has completions, NaN not at all."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"log_metric({name!r}, {value!r}): the value must be a number") from None
        if not math.isnan(number):
            self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions."""
        values = list(values)
        if len(values) != self.count:
            raise ValueError(
                f"log_extra({column!r}, …): {len(values)} values for {self.count} completions; give one each"
            )
        self.columns.append((str(column), [valid_text(x) if isinstance(x, str) else x for x in values]))


# ---------------------------------------------------------------- the progress of the run


@dataclass
class TrainerState:
    """The fields of transformers' ``TrainerState`` that exist here, for example for a reward with a schedule."""

    #: Optimizer steps so far.
    global_step: int = 0
    #: Optimizer steps of the whole run; 0: not known.
    max_steps: int = 0
    #: Passes over the training records so far, a fraction.
    epoch: float = 0.0
    #: Tokens that training has seen so far, over all ranks.
    num_input_tokens_seen: int = 0
    is_world_process_zero: bool = True
    #: The last logged metrics without ``time/*``, with their ``step``, in a list of at most one.
    log_history: list[dict[str, float]] = field(default_factory=list)


def trainer_state(trainer: "Trainer | None", epoch: float) -> TrainerState:
    """The state of a Lightning trainer; zeros where there is none."""
    if trainer is None:
        return TrainerState()
    step, total = trainer.global_step, trainer.max_steps
    if total < 0 and trainer.state.fn == "fit":
        estimate = trainer.estimated_stepping_batches
        total = 0 if estimate == float("inf") else int(estimate)
    module = trainer.lightning_module
    # TRL's log has its own names, which TensorBoard shows with the prefix.
    latest = {name.removeprefix("train/"): value for name, value in getattr(module, "regular_metrics", {}).items()}
    return TrainerState(
        step,
        max(0, total),
        epoch,
        getattr(module, "num_tokens", 0),
        trainer.is_global_zero,
        [{**latest, "step": step}] if latest else [],
    )


# ---------------------------------------------------------------- the values


class TooLong(Exception):
    """A reward function exceeded its time limit."""


@dataclass
class Call:
    """One function's share of a batch, whose first sample is ``first``; other numbers of samples are the batch's."""

    function: int
    name: str
    first: int
    given: dict[str, Any]
    arguments: dict[str, Any]
    values: list[float] = field(default_factory=list)
    #: Samples that the function failed on, with the error.
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    #: Rewards of samples whose tokens have a number each.
    lists: dict[int, list[float]] = field(default_factory=dict)
    #: What the function logged, where it returned.
    logs: list[RewardLog] = field(default_factory=list)

    def refusal(self, what: str) -> UsageError:
        return UsageError(f"reward function {self.name!r} returned {what}")

    def reward(self, value: Any, i: int, by_token: bool) -> float:
        """The reward of the share's i-th sample: a number, or the sum of one per token, which are kept."""
        if not (isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1):
            return self._number(value, i)
        sample, ids = self.first + i, self.given["completion_ids"]
        if not by_token:
            raise self.refusal(
                f"{short(value)} for sample {sample}: a reward per token, which RLHFPPO alone learns "
                "from; return one number"
            )
        if ids is None or len(value) != len(ids[i]):
            tokens = "an unknown number of" if ids is None else len(ids[i])
            raise self.refusal(
                f"{len(value)} numbers for sample {sample}, whose completion has {tokens} tokens; "
                "return one number, or one per token of completion_ids"
            )
        numbers = [self._number(number, i) for number in value]
        if any(math.isnan(number) for number in numbers):
            raise self.refusal(
                f"{short(value)} for sample {sample}, with a None or NaN in it; where a token earns "
                "nothing the number is 0"
            )
        self.lists[sample] = numbers
        return math.fsum(numbers)

    def _number(self, value: Any, i: int) -> float:
        """A returned value as a float; None becomes NaN."""
        if value is None:
            return math.nan
        number = None
        if not isinstance(value, str | bytes):
            try:
                number = float(value)  # numbers of NumPy and PyTorch too
            except (TypeError, ValueError, RuntimeError, OverflowError):
                number = None
        if number is None or abs(number) > torch.finfo(torch.float32).max:
            completion = short(self.given["completions"][i])
            raise self.refusal(
                f"{short(value)} for sample {self.first + i} (completion {completion}), where a finite "
                "number or None should be"
            )
        return number


def short(value: Any) -> str:
    """The beginning of a value, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
