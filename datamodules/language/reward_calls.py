"""Calls of reward functions, the user's among them: values are checked, and a failure affects only its sample."""

import inspect
import math
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from datamodules.language import reward_logging
from datamodules.language.coroutines import EventLoop, TooLong
from datamodules.language.notices import notice
from datamodules.language.reward_arguments import RENDERED, accepted, columns_of, names_argument, own_part
from datamodules.language.reward_logging import LOGGING, RewardLog
from datamodules.language.trainer_state import TrainerState
from rl_modules.common.errors import UsageError, visible, what_happened


class RewardFunctions:
    """Several reward functions, called on a batch.

    A function that raises, exits or takes too long on some samples gives NaN for them: halves of the batch are called
    in turn until the failing samples stand alone. A function that fails on every sample of a batch ends the run, unless
    all samples have the same prompt, which may be the cause. If the function has returned no value so far, it then ends
    the run at the next prompt.

    Args:
        funcs: functions with TRL's signature; coroutine functions too, which run at once, in one event loop until
            :meth:`close`. One that takes no ``**columns`` gets those it names.
        time_limit_s: longest that one call may take, in seconds; None: no limit. Under a limit the functions run in a
            thread of their own.
        workers: calls that run at once, in threads. Above 1 each function is called on up to as many parts of the
            batch; the completions of one prompt stay in one part.

    Raises:
        UsageError: a limit that is not positive, or no worker.
    """

    def __init__(
        self, funcs: Sequence[Callable[..., Any]], time_limit_s: float | None = None, workers: int = 1
    ) -> None:
        if time_limit_s is not None and not time_limit_s > 0:
            raise UsageError(f"the reward functions' time limit of {time_limit_s} s must be positive")
        if workers < 1:
            raise UsageError(f"reward_workers={workers} must be at least 1")
        self.funcs = list(funcs)
        self.time_limit_s, self.workers = time_limit_s, workers
        #: Passed as ``trainer_state``, as TRL does; None: not passed.
        self.trainer_state: TrainerState | None = None
        #: One name per function, all different, for metrics.
        self.names = _distinct([function_name(func) for func in self.funcs])
        #: Returns the text that the model reads of a record; None: unknown.
        self.as_read: Callable[[dict[str, Any]], str] | None = None
        self._wants_text = any(names_argument(func, RENDERED) for func in self.funcs)
        #: Whether a function may return a list of numbers for a completion, one per token.
        self.by_token = False
        #: Such lists of the last batch: by function, by sample.
        self._lists: dict[int, dict[int, list[float]]] = {}
        #: What was logged since the last call of :meth:`take_logged`, and about the last batch.
        self._logged: list[RewardLog] = []
        self._last_logged: list[RewardLog] = []
        self._failures = dict.fromkeys(self.names, 0)
        self._reported: set[str] = set()
        #: Names of the functions that have returned a value, and of the others the prompts that they failed on.
        self._scored: set[str] = set()
        self._unscored: dict[str, set[str]] = {}
        self._warned_of_none = False
        self._loop = EventLoop()

    def __len__(self) -> int:
        return len(self.funcs)

    def __call__(
        self,
        records: Sequence[dict[str, Any]],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Scores completions.

        Args:
            records: B, one per completion; their columns are passed on. Where the prompt is a list of chat messages,
                the completion is passed as one, too.
            completions: B texts.
            completion_ids: B lists of token ids.

        Returns:
            [B, F] float32; NaN where a function does not apply or failed.

        Raises:
            UsageError: a function fails on every sample (see the class), needs a column that is missing, or returns
                anything but B numbers.
        """
        given = self._given(records, completions, completion_ids, self.trainer_state)
        arguments = self._arguments(given)
        parts = self._parts(records)
        if self.workers == 1:
            calls = self._run(arguments, given, *parts[0])
        else:
            calls = [_Call(j, start, stop) for j in range(len(self.funcs)) for start, stop in parts]

            def run(call: "_Call") -> None:
                call.values = self._scores(call, arguments[call.function], given, call.start, call.stop)

            with ThreadPoolExecutor(self.workers, thread_name_prefix="reward") as pool:
                list(pool.map(run, calls))
        return self._collected(calls, records, given)

    def close(self) -> None:
        """Ends the coroutines that still run, and their event loop; a later call opens another one."""
        self._loop.close()

    def score_part(
        self,
        first: int,
        records: Sequence[dict[str, Any]],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        state: TrainerState | None = None,
    ) -> list["_Call"]:
        """Scores a part of an incomplete batch; :meth:`join_parts` joins the parts.

        Args:
            first: place of the part's first sample in the batch.
            records: one per completion of the part.
            completions: their texts.
            completion_ids: their token ids.
            state: passed as ``trainer_state``.
        """
        given = self._given(records, completions, completion_ids, state)
        calls = self._run(self._arguments(given), given, 0, len(records))
        for call in calls:
            call.start, call.stop = call.start + first, call.stop + first
            call.failures = [(first + i, error) for i, error in call.failures]
            for log in call.logs:
                log.start += first
            call.lists = {first + i: numbers for i, numbers in call.lists.items()}
        return calls

    def _run(self, arguments: Sequence[dict[str, Any]], given: dict[str, Any], start: int, stop: int) -> list["_Call"]:
        """Calls every function on samples ``start`` to ``stop``: coroutine functions at once, the others in turn."""
        calls = [_Call(j, start, stop) for j in range(len(self.funcs))]
        for call in calls:
            if _is_coroutine_function(self.funcs[call.function]):
                call.begun = self._begin(call, arguments[call.function], start, stop)
        for call in calls:
            call.values = self._scores(call, arguments[call.function], given, start, stop)
        return calls

    def _begin(
        self, call: "_Call", arguments: dict[str, Any], start: int, stop: int
    ) -> tuple[RewardLog, Callable[[], Any]]:
        """Returns a call's log, and what waits for its values: of a coroutine function, which begins here, or of
        another one, which it calls.
        """
        func, log = self.funcs[call.function], RewardLog(start, stop - start)
        part = own_part(arguments, start, stop)
        part |= {argument: getattr(log, argument) for argument in LOGGING if argument in part}
        if _is_coroutine_function(func):
            return log, self._loop.start(partial(func, **part), self.time_limit_s)
        return log, partial(self._call, func, part)

    def join_parts(
        self, calls: Sequence["_Call"], records: Sequence[dict[str, Any]], completions: Sequence[str]
    ) -> Tensor:
        """Returns the rewards of a whole batch from its parts, [B, F]; see :meth:`__call__`.

        Args:
            calls: what :meth:`score_part` returned, for all parts.
            records: B, one per completion.
            completions: B texts.
        """
        return self._collected(calls, records, self._given(records, completions, None, None))

    def _given(
        self,
        records: Sequence[dict[str, Any]],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None,
        state: TrainerState | None,
    ) -> dict[str, Any]:
        """All that reward functions may ask for."""
        given: dict[str, Any] = {
            "prompts": [record["prompt"] for record in records],
            "completions": [
                text if isinstance(record["prompt"], str) else [{"role": "assistant", "content": text}]
                for record, text in zip(records, completions, strict=True)
            ],
            "completion_ids": completion_ids,
            **(columns_of(records) if self.funcs else {}),
            **dict.fromkeys(LOGGING),  # each call has its own
        }
        if self._wants_text and self.as_read is not None:
            given[RENDERED] = [self.as_read(record) for record in records]
        if state is not None:
            given["trainer_state"] = state
        return given

    def _arguments(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns each function's arguments."""
        return [accepted(func, name, given) for func, name in zip(self.funcs, self.names, strict=True)]

    def _collected(self, calls: Sequence["_Call"], records: Sequence[dict[str, Any]], given: dict[str, Any]) -> Tensor:
        """Returns the rewards of all calls, [B, F]; failures are counted and reported."""
        rewards = torch.full((len(records), len(self.funcs)), math.nan, dtype=torch.float32)
        self._lists = {}
        self._last_logged = [log for call in sorted(calls, key=lambda c: (c.function, c.start)) for log in call.logs]
        self._logged += self._last_logged
        for call in calls:
            if call.lists:
                self._lists.setdefault(call.function, {}).update(call.lists)
            rewards[call.start : call.stop, call.function] = torch.tensor(call.values, dtype=torch.float32)
        for j, name in enumerate(self.names):
            self._report(name, [f for call in calls if call.function == j for f in call.failures], given)
        self._warn_of_none(rewards)
        return rewards

    @property
    def has_failed(self) -> bool:
        """Whether a function failed on a sample since the last call of :meth:`take_failures`."""
        return any(self._failures.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that decides whether a failure ends the run: the functions that have returned a value, and
        the prompts on which the others failed.
        """
        return {"scored": sorted(self._scored), "unscored": {name: sorted(x) for name, x in self._unscored.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._scored = set(state.get("scored", ()))
        self._unscored = {name: set(prompts) for name, prompts in state.get("unscored", {}).items()}

    def take_failures(self) -> dict[str, int]:
        """Number of samples that each function has failed on since the last call of this method."""
        taken, self._failures = self._failures, dict.fromkeys(self.names, 0)
        return taken

    def take_logged(self) -> dict[str, tuple[float, int]]:
        """The mean of each metric that the functions logged since the last call of this method, and its weight."""
        taken, self._logged = self._logged, []
        return reward_logging.means(taken)

    def take_extra(self, count: int) -> list[dict[str, Any]]:
        """Returns the values that functions logged for each of the last batch's ``count`` completions, by column."""
        taken, self._last_logged = self._last_logged, []
        return reward_logging.rows(taken, count)

    def take_token_rewards(self, rewards: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """The last batch's rewards token by token; None where every function returned one number per completion.

        Args:
            rewards: what the call returned, [B, F].
            lengths: tokens of each completion.

        Returns:
            [B, L, F] float32: a list stays with its tokens, one number goes to the last token; 0 where a function does
            not apply.
        """
        lists, self._lists = self._lists, {}
        if not lists:
            return None
        count, functions = rewards.shape
        spread = torch.zeros((count, max(lengths), functions), dtype=torch.float32)
        last = torch.tensor(lengths, dtype=torch.int64) - 1
        spread[torch.arange(count), last] = rewards.nan_to_num(nan=0.0)
        for function, samples in lists.items():
            for sample, numbers in samples.items():
                spread[sample, : len(numbers), function] = torch.tensor(numbers, dtype=torch.float32)
        return spread

    def _parts(self, records: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
        """Returns the batch in up to ``workers`` parts of similar size, cut where another prompt begins."""
        n = len(records)
        begins = [i for i in range(1, n) if records[i]["prompt"] != records[i - 1]["prompt"]]
        cuts = [0]
        for k in range(1, self.workers):
            later = [i for i in begins if i > cuts[-1]]
            if later:
                cuts.append(min(later, key=lambda i: abs(i - k * n / self.workers)))
        return list(pairwise([*cuts, n]))

    def _scores(
        self, call: "_Call", arguments: dict[str, Any], given: dict[str, Any], start: int, stop: int
    ) -> list[float]:
        """The function's values for samples ``start`` to ``stop``; NaN, noted in the call, for those it fails on."""
        name, n = self.names[call.function], stop - start
        begun, call.begun = call.begun, None
        log, wait = begun or self._begin(call, arguments, start, stop)
        try:
            values = wait()
        except (Exception, SystemExit) as error:
            if n <= 1:
                call.failures.extend((i, error) for i in range(start, stop))
                return [math.nan] * n
            # Each half that contains the hanging sample would take the whole limit again.
            alone = isinstance(error, TooLong)
            middle = (start + stop) // 2
            pieces = [(i, i + 1) for i in range(start, stop)] if alone else [(start, middle), (middle, stop)]
            return [value for piece in pieces for value in self._scores(call, arguments, given, *piece)]
        if not _is_sequence(values):
            raise UsageError(f"reward function {name!r} returned a {type(values).__name__}, not a list of {n} numbers")
        if len(values) != n:
            raise UsageError(f"reward function {name!r} returned {len(values)} values for {n} completions")
        call.logs.append(log)
        return [self._value(call, value, start + i, given) for i, value in enumerate(values)]

    def _value(self, call: "_Call", value: Any, i: int, given: dict[str, Any]) -> float:
        """Converts a returned value to a float: a list with a number per token to its sum; the list is stored in the
        call.
        """
        name = self.names[call.function]
        if not _is_list(value):
            return _number(value, name, i, given)
        if not self.by_token:
            raise UsageError(f"reward function {name!r} returned {_short(value)} for sample {i}: a reward per token, "
                             "which RLHFPPO alone learns from; return one number")  # fmt: skip
        ids = given["completion_ids"]
        if ids is None or len(value) != len(ids[i]):
            tokens = "an unknown number of" if ids is None else len(ids[i])
            raise UsageError(f"reward function {name!r} returned {len(value)} numbers for sample {i}, whose completion "
                             f"has {tokens} tokens; return one number, or one per token of completion_ids")  # fmt: skip
        numbers = [_number(number, name, i, given) for number in value]
        if any(math.isnan(number) for number in numbers):
            raise UsageError(f"reward function {name!r} returned {_short(value)} for sample {i}, with a None or NaN in "
                             "it; where a token earns nothing the number is 0")  # fmt: skip
        call.lists[i] = numbers
        return math.fsum(numbers)

    def _warn_of_none(self, rewards: Tensor) -> None:
        """Warns once if a batch has no completion with a reward, so that nothing is learned from it."""
        if not self._warned_of_none and rewards.numel() and not self.has_failed and rewards.isnan().all():
            self._warned_of_none = True
            notice(f"reward_funcs={', '.join(self.names)}: None or NaN, which is no reward, for all {len(rewards)} "
                   "completions of a batch; such completions are left out")  # fmt: skip

    def _failed_on_several(self, name: str, given: dict[str, Any]) -> bool:
        """Whether a batch without a value has several prompts, or a function without any value has failed on several.

        A call may have a single prompt: a round of ``dynamic_sampling``, a rank's part of a small batch, the rest of an
        evaluation.
        """
        prompts = set() if name in self._scored else self._unscored.setdefault(name, set())
        prompts.update(map(repr, given["prompts"]))
        return len(prompts) > 1

    def _report(self, name: str, failures: list[tuple[int, BaseException]], given: dict[str, Any]) -> None:
        """Counts the samples that a function failed on; reports the first failure.

        Raises:
            UsageError: it failed on all of them, and they have several prompts.
        """
        n = len(given["completions"])
        self._failures[name] += len(failures)
        if len(failures) < n:
            self._scored.add(name)
        if not failures:
            return
        sample, error = min(failures, key=lambda failure: failure[0])
        example = _short(given["completions"][sample])
        what = f"took longer than {self.time_limit_s} s" if isinstance(error, TooLong) else (
            f"raised {visible(what_happened(error))}")  # fmt: skip
        if len(failures) == n and self._failed_on_several(name, given):
            raise UsageError(f"reward function {name!r} {what} on all {n} completions, such as {example}") from error
        if name not in self._reported:
            self._reported.add(name)
            # Printed, for `rl fit` shows no log of this level.
            print(f"reward function {name!r} {what} on {len(failures)} of {n} completions, such as {example}: they get "
                  f"no reward from it; from here on see the metric rewards/{name}/failed", flush=True)  # fmt: skip

    def _call(self, func: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if self.time_limit_s is None:
            return self._value_of(func(**arguments))
        outcome: list[tuple[bool, Any]] = []

        def work() -> None:
            try:
                outcome.append((True, self._value_of(func(**arguments))))
            except BaseException as error:
                outcome.append((False, error))

        # Python can't stop a thread; as a daemon it does not keep the process from ending with the error.
        thread = threading.Thread(target=work, daemon=True, name="reward function")
        thread.start()
        thread.join(self.time_limit_s)
        if not outcome:
            raise TooLong
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        return value

    def _value_of(self, result: Any) -> Any:
        """Waits for what a function returned, if it is a coroutine."""
        return self._loop.start(lambda: result, self.time_limit_s)() if inspect.isawaitable(result) else result


@dataclass
class _Call:
    """One function's share of a batch: samples ``start`` to ``stop``."""

    function: int
    start: int
    stop: int
    values: list[float] = field(default_factory=list)
    #: Samples that the function failed on, with the error.
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    #: Rewards of samples whose tokens have a number each.
    lists: dict[int, list[float]] = field(default_factory=dict)
    #: What the function logged, where it returned.
    logs: list[RewardLog] = field(default_factory=list)
    #: The log and the values of a coroutine function that runs already.
    begun: tuple[RewardLog, Callable[[], Any]] | None = None


def function_name(func: Callable[..., Any]) -> str:
    """Returns a function's name for metrics and messages."""
    func = getattr(func, "func", func) if not hasattr(func, "__name__") else func
    return getattr(func, "__name__", type(func).__name__)


def _is_coroutine_function(func: Callable[..., Any]) -> bool:
    """Whether a call of the function, or of the object's ``__call__``, returns a coroutine."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _is_sequence(values: Any) -> bool:
    """Whether values have a length and an order: a set has none, a tensor or array without dimensions no length."""
    if isinstance(values, str | bytes | dict | Set) or getattr(values, "ndim", 1) == 0:
        return False
    return hasattr(values, "__len__") and hasattr(values, "__iter__")


def _is_list(value: Any) -> bool:
    """Returns whether a value is several numbers: a list, a tuple, or an array with one dimension."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1


def _number(value: Any, name: str, i: int, given: dict[str, Any]) -> float:
    """Converts a returned value to a float; None becomes NaN."""
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
    """Returns the same names, where the second "f" is called "f_2"."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct
