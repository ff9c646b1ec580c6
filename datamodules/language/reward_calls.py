"""Calling reward functions, which may be anybody's: values are checked, failures name the function and sample."""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError

#: Columns that a reward function gets by other names, or not at all (TRL's choice).
_NOT_PASSED = frozenset({"prompt", "completion", "completion_ids", "prompt_ids"})


class RewardFunctions:
    """Several reward functions, called on a batch.

    Args:
        funcs: functions with TRL's signature; coroutine functions too. One that takes no ``**columns`` gets those it
            names.
        time_limit_s: longest that one call may take, in seconds; None: no limit. Under a limit the functions run in a
            thread of their own.

    Raises:
        UsageError: a limit that is not positive.
    """

    def __init__(self, funcs: Sequence[Callable[..., Any]], time_limit_s: float | None = None) -> None:
        if time_limit_s is not None and not time_limit_s > 0:
            raise UsageError(f"the reward functions' time limit of {time_limit_s} s must be positive")
        self.funcs = list(funcs)
        self.time_limit_s = time_limit_s
        #: One name per function, all different, for metrics.
        self.names = _distinct([function_name(func) for func in self.funcs])

    def __len__(self) -> int:
        return len(self.funcs)

    def __call__(
        self,
        records: Sequence[dict[str, Any]],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Score completions.

        Args:
            records: B, one per completion; their columns are passed on. Where the prompt is a list of chat messages,
                the completion is passed as one, too.
            completions: B texts.
            completion_ids: B lists of token ids.

        Returns:
            [B, F] float32; NaN where a function does not apply.

        Raises:
            UsageError: a function raises, hangs, needs a column that is missing, or returns anything but B numbers.
        """
        given: dict[str, Any] = {
            "prompts": [record["prompt"] for record in records],
            "completions": [
                text if isinstance(record["prompt"], str) else [{"role": "assistant", "content": text}]
                for record, text in zip(records, completions, strict=True)
            ],
            "completion_ids": completion_ids,
            **columns_of(records),
        }
        rewards = torch.full((len(records), len(self.funcs)), math.nan, dtype=torch.float32)
        for j, (func, name) in enumerate(zip(self.funcs, self.names, strict=True)):
            values = self._scores(func, name, given, len(records))
            rewards[:, j] = torch.tensor(values, dtype=torch.float32)
        return rewards

    def _scores(self, func: Callable[..., Any], name: str, given: dict[str, Any], n: int) -> list[float]:
        arguments = _accepted(func, name, given)
        try:
            values = self._call(func, arguments)
        except (Exception, SystemExit) as error:
            sample = self._first_failing(func, arguments, n)
            what = f"took longer than {self.time_limit_s} s" if isinstance(error, _TooLong) else (
                f"raised {type(error).__name__}: {' '.join(str(error).split())}")  # fmt: skip
            where = "" if sample is None else f" on sample {sample} (completion {_short(given['completions'][sample])})"
            raise UsageError(f"reward function {name!r} {what}{where}") from error
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            raise UsageError(f"reward function {name!r} returned a {type(values).__name__}, not a list of {n} numbers")
        if len(values) != n:
            raise UsageError(f"reward function {name!r} returned {len(values)} values for {n} completions")
        return [_number(value, name, i, given) for i, value in enumerate(values)]

    def _call(self, func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if self.time_limit_s is None:
            return _run(func, arguments)
        outcome: list[tuple[bool, Any]] = []

        def work() -> None:
            try:
                outcome.append((True, _run(func, arguments)))
            except BaseException as error:
                outcome.append((False, error))

        # Python can't stop a thread; as a daemon it does not keep the process from ending with the error.
        thread = threading.Thread(target=work, daemon=True, name="reward function")
        thread.start()
        thread.join(self.time_limit_s)
        if not outcome:
            raise _TooLong
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        return value

    def _first_failing(self, func: Callable[..., Any], arguments: dict[str, Any], n: int) -> int | None:
        """The first sample that fails on its own, found by calling the function on one after the other."""
        for i in range(n):
            one = {key: value if value is None else [value[i]] for key, value in arguments.items()}
            try:
                self._call(func, one)
            except (Exception, SystemExit):
                return i
        return None


class _TooLong(Exception):
    """The time limit passed."""


def columns_of(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The records' columns as reward functions get them; None where a record lacks one."""
    names = dict.fromkeys(name for record in records for name in record if name not in _NOT_PASSED)
    return {name: [record.get(name) for record in records] for name in names}


def function_name(func: Callable[..., Any]) -> str:
    """A function's name for metrics and messages."""
    func = getattr(func, "func", func) if not hasattr(func, "__name__") else func
    return getattr(func, "__name__", type(func).__name__)


def _accepted(func: Callable[..., Any], name: str, given: dict[str, Any]) -> dict[str, Any]:
    """What of ``given`` the function takes."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # builtins written in C tell nothing
        return given
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # fmt: skip
        if needed and parameter.name not in given:
            columns = [key for key in given if key not in ("prompts", "completions", "completion_ids")]
            raise UsageError(f"reward function {name!r} needs a column {parameter.name!r}, but the records have only "
                             f"{', '.join(columns) or 'prompts'}; map one with columns")  # fmt: skip
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}


def _run(func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    result = func(**arguments)
    return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _number(value: Any, name: str, i: int, given: dict[str, Any]) -> float:
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
        raise UsageError(f"reward function {name!r} returned {_short(value)} for sample {i} (completion "
                         f"{_short(given['completions'][i])}), where a finite number or None should be")  # fmt: skip
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _distinct(names: list[str]) -> list[str]:
    """The same names, where the second "f" is called "f_2"."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct
