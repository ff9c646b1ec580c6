"""Calls of reward functions, the user's among them: values are checked, and a failure affects only its sample."""

import inspect
import math
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from threading import Timer
from typing import Any

import torch
from torch import Tensor

from datamodules.language.event_loop import EventLoop, in_time
from datamodules.language.reward_arguments import (
    LOGGING,
    RENDERED,
    SHARED,
    Call,
    RewardLog,
    TooLong,
    TrainerState,
    accepted,
    columns_of,
    copied,
    parameters_of,
    short,
)
from rl_modules.common.errors import UsageError, visible, what_happened
from rl_modules.common.notices import notice
from rl_modules.core.state import Stateful, persistent

#: Seconds after which a call without a time limit is named.
SLOW_S = 60.0


class RewardFunctions(Stateful):
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
    """

    #: Names of the functions that have returned a value, and of the others up to two prompts that they failed on.
    _scored: list[str] = persistent([])
    _unscored: dict[str, list[str]] = persistent({})

    def __init__(
        self, funcs: Sequence[Callable[..., Any]], time_limit_s: float | None = None, workers: int = 1
    ) -> None:
        self.funcs = list(funcs)
        self.time_limit_s, self.workers = time_limit_s, workers
        #: Passed as ``trainer_state``, as TRL does; None: not passed.
        self.trainer_state: TrainerState | None = None
        #: One name per function, all different, for metrics.
        self.names = _distinct([function_name(func) for func in self.funcs])
        #: Returns the text that the model reads of a record; None: unknown.
        self.as_read: Callable[[dict[str, Any]], str] | None = None
        self._parameters = list(map(parameters_of, self.funcs))
        self._wants_text = any(RENDERED in parameters for parameters in self._parameters)
        self._is_coroutine = list(map(_is_coroutine_function, self.funcs))
        #: Whether a function may return a list of numbers for a completion, one per token.
        self.by_token = False
        #: The calls of the last batch, and what was logged and failed since the last call of :meth:`take_notes`.
        self._last: list[Call] = []
        self._logged: list[RewardLog] = []
        self._failures = dict.fromkeys(self.names, 0)
        self._reported: set[str] = set()
        self._warned_of_none = False
        self._is_slow: set[str] = set()

    def __len__(self) -> int:
        return len(self.funcs)

    def __call__(
        self,
        records: Sequence[dict[str, Any]],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Scores B completions, texts or lists of chat messages; [B, F] float32, NaN where a function does not apply or
        failed. Records, whose columns are passed on, and token ids are one per completion; where a prompt is a list of
        chat messages, its completion is passed as one, too.

        Raises:
            UsageError: a function fails on every sample (see the class), needs a column that is missing, or returns
                anything but B numbers.
        """
        if self.workers == 1:
            calls = self.score(0, records, completions, completion_ids, self.trainer_state)
        else:
            calls = self._score_in_parts(records, completions, completion_ids)
        return self.joined(calls, records, completions)

    def close(self) -> None:
        """Ends the coroutines that still run, and their event loop; a later call opens another one."""
        if "_loop" in vars(self):
            self.loop.close()

    @property
    def loop(self) -> EventLoop:
        """The event loop of coroutine functions, made with the first of them, by whichever thread."""
        loop: EventLoop = vars(self).setdefault("_loop", EventLoop())
        return loop

    def _score_in_parts(
        self,
        records: Sequence[dict[str, Any]],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None,
    ) -> list[Call]:
        """Calls each function on as many parts of a batch as there are workers, of whole prompts and similar sizes."""
        n = len(records)
        begins = [i for i in range(1, n) if records[i]["prompt"] != records[i - 1]["prompt"]]
        cuts = [0]
        for k in range(1, self.workers):
            later = [i for i in begins if i > cuts[-1]]
            if later:
                cuts.append(min(later, key=lambda i: abs(i - k * n / self.workers)))

        def score(function: int, first: int, stop: int) -> list[Call]:
            here = slice(first, stop)
            ids = None if completion_ids is None else completion_ids[here]
            return self.score(first, records[here], completions[here], ids, self.trainer_state, [function])

        with ThreadPoolExecutor(self.workers, thread_name_prefix="reward") as pool:
            calls = [
                pool.submit(score, function, *part) for function in range(len(self)) for part in pairwise([*cuts, n])
            ]
            return [call for found in calls for call in found.result()]

    def score(
        self,
        first: int,
        records: Sequence[dict[str, Any]],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None,
        state: TrainerState | None,
        functions: Sequence[int] | None = None,
    ) -> list[Call]:
        """Scores a part of a batch that begins at its sample ``first``; :meth:`joined` joins the parts."""
        given: dict[str, Any] = {
            "prompts": [record["prompt"] for record in records],
            "completions": [
                text
                if isinstance(record["prompt"], str) or not isinstance(text, str)
                else [{"role": "assistant", "content": text}]
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
        numbers = range(len(self.funcs)) if functions is None else functions
        calls = [
            Call(j, self.names[j], first, given, accepted(self._parameters[j], self.names[j], given)) for j in numbers
        ]
        # Coroutine functions run at once, the others in turn.
        begun = [self._begin(call, 0, len(records)) if self._is_coroutine[call.function] else None for call in calls]
        for call, running in zip(calls, begun, strict=True):
            call.values = self._scores(call, 0, len(records), running)
        return calls

    def joined(self, calls: Sequence[Call], records: Sequence[dict[str, Any]], completions: Sequence[str]) -> Tensor:
        """The rewards of a whole batch from the calls of all its parts, [B, F]; counts and reports failures."""
        rewards = torch.full((len(records), len(self.funcs)), math.nan, dtype=torch.float32)
        self._last = sorted(calls, key=lambda call: (call.function, call.first))
        self._logged += [log for call in self._last for log in call.logs]
        for call in self._last:
            rewards[call.first : call.first + len(call.values), call.function] = torch.tensor(call.values)
        for j, name in enumerate(self.names):
            failures = [failure for call in calls if call.function == j for failure in call.failures]
            if len(failures) < len(records) and name not in self._scored:
                self._scored.append(name)
            if failures:
                self._report(name, failures, records, completions)
        if not self._warned_of_none and rewards.numel() and rewards.isnan().all() and not self.has_failed:
            self._warned_of_none = True
            notice(
                f"reward_funcs={', '.join(self.names)}: None or NaN, which is no reward, for all {len(rewards)} "
                "completions of a batch; such completions are left out"
            )
        return rewards

    @property
    def has_failed(self) -> bool:
        """Whether a function failed on a sample since the last call of :meth:`take_notes`."""
        return any(self._failures.values())

    def note(self, metrics: dict[str, tuple[float, int]]) -> None:
        """Adds the caller's own means of metrics and their weights to what the functions logged."""
        for name, (mean, weight) in metrics.items():
            log = RewardLog(0, weight)
            log.log_metric(name, mean)
            self._logged.append(log)

    def take_notes(self) -> dict[str, dict[str, Any]]:
        """Samples that each function ``failed`` on, and mean and weight of what was ``logged``, since the last call."""
        failed, self._failures = self._failures, dict.fromkeys(self.names, 0)
        logs, self._logged = self._logged, []
        sums: dict[str, tuple[float, int]] = {}
        for log in logs:
            for name, value in log.metrics:
                total, weight = sums.get(name, (0.0, 0))
                sums[name] = total + value * log.count, weight + log.count
        return {"failed": failed, "logged": {name: (total / weight, weight) for name, (total, weight) in sums.items()}}

    def extra(self, count: int) -> list[dict[str, Any]]:
        """The values that functions logged for each of the last batch's ``count`` completions, by column."""
        found: list[dict[str, Any]] = [{} for _ in range(count)]
        for log in (log for call in self._last for log in call.logs):
            for column, values in log.columns:
                for i, value in enumerate(values, log.start):
                    found[i][column] = value
        return found

    def token_rewards(self, rewards: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """Rewards by token, [B, L, F] float32: a number per completion goes to its last token; None: all are such."""
        if not any(call.lists for call in self._last):
            return None
        count, functions = rewards.shape
        spread = torch.zeros((count, max(lengths), functions), dtype=torch.float32)
        last = torch.tensor(lengths, dtype=torch.int64) - 1
        spread[torch.arange(count), last] = rewards.nan_to_num(nan=0.0)
        for call in self._last:
            for sample, numbers in call.lists.items():
                spread[sample, : len(numbers), call.function] = torch.tensor(numbers, dtype=torch.float32)
        return spread

    def _begin(self, call: Call, start: int, stop: int) -> tuple[RewardLog, Callable[[], Any]]:
        """The log of samples ``start`` to ``stop``, and a function that waits for their values."""
        func, log = self.funcs[call.function], RewardLog(call.first + start, stop - start)
        part = {
            key: value if value is None or key in SHARED else copied(list(value[start:stop]))
            for key, value in call.arguments.items()
        }
        part |= {argument: getattr(log, argument) for argument in LOGGING if argument in part}
        if self._is_coroutine[call.function]:
            return log, self.loop.start(partial(func, **part), self.time_limit_s)
        if self.time_limit_s is None:
            return log, partial(func, **part)
        return log, partial(in_time, func, part, self.loop, self.time_limit_s)

    def _scores(
        self, call: Call, start: int, stop: int, begun: tuple[RewardLog, Callable[[], Any]] | None = None
    ) -> list[float]:
        """The function's values for samples ``start`` to ``stop``; NaN, noted in the call, for those it fails on."""
        n = stop - start
        log, wait = begun or self._begin(call, start, stop)
        try:
            with self._noting_slowness(call.name, n):
                values = wait()
                if inspect.isawaitable(values):
                    values = self.loop.value_of(values, self.time_limit_s)
        except (Exception, SystemExit, GeneratorExit, CancelledError) as error:
            if n <= 1:
                call.failures.extend((call.first + i, error) for i in range(start, stop))
                return [math.nan] * n
            # Each half that contains the hanging sample would take the whole limit again.
            alone = isinstance(error, TooLong)
            middle = (start + stop) // 2
            pieces = [(i, i + 1) for i in range(start, stop)] if alone else [(start, middle), (middle, stop)]
            return [value for piece in pieces for value in self._scores(call, *piece)]
        # A set has no order, a tensor or array without dimensions no length.
        is_other = isinstance(values, str | bytes | dict | Set) or getattr(values, "ndim", 1) == 0
        if is_other or not (hasattr(values, "__len__") and hasattr(values, "__iter__")):
            raise call.refusal(f"a {type(values).__name__}, not a list of {n} numbers")
        if len(values) != n:
            raise call.refusal(f"{len(values)} values for {n} completions")
        call.logs.append(log)
        return [call.reward(value, start + i, self.by_token) for i, value in enumerate(values)]

    @contextmanager
    def _noting_slowness(self, name: str, n: int) -> Iterator[None]:
        """Says once of a function without a time limit that a call of it takes long, while it does."""

        def note() -> None:
            self._is_slow.add(name)
            notice(
                f"reward function {name!r} has taken {SLOW_S:g} s for {n} completions, and the run waits for it: "
                "reward_time_limit_s bounds a call, reward_workers runs several at once"
            )

        timer = None if self.time_limit_s is not None or name in self._is_slow else Timer(SLOW_S, note)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _report(
        self, name: str, failures: list[tuple[int, BaseException]], records: Sequence[Any], completions: Sequence[str]
    ) -> None:
        """Counts and reports the samples that a function failed on; refuses one that fails on several prompts."""
        n = len(completions)
        self._failures[name] += len(failures)
        sample, error = min(failures, key=lambda failure: failure[0])
        example = short(completions[sample])
        what = (
            f"took longer than {self.time_limit_s} s"
            if isinstance(error, TooLong)
            else (f"raised {visible(what_happened(error))}")
        )
        if len(failures) == n:
            # A call may have a single prompt: a round of dynamic_sampling, a rank's part, the rest of an evaluation.
            before = [] if name in self._scored else self._unscored.get(name, [])
            prompts = list(dict.fromkeys([*before, *(repr(record["prompt"]) for record in records)]))[:2]
            if name not in self._scored:
                self._unscored[name] = prompts
            if len(prompts) > 1:
                raise UsageError(
                    f"reward function {name!r} {what} on all {n} completions, such as {example}"
                ) from error
        if name not in self._reported:
            self._reported.add(name)
            # Printed, for `rl fit` shows no log of this level.
            print(
                f"reward function {name!r} {what} on {len(failures)} of {n} completions, such as {example}: they get "
                f"no reward from it; from here on see the metric rewards/{name}/failed",
                flush=True,
            )


def function_name(func: Callable[..., Any]) -> str:
    """A function's name for metrics and messages."""
    func = getattr(func, "func", func) if not hasattr(func, "__name__") else func
    return getattr(func, "__name__", type(func).__name__)


def _is_coroutine_function(func: Callable[..., Any]) -> bool:
    """Whether a call of the function, or of the object's ``__call__``, returns a coroutine."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _distinct(names: list[str]) -> list[str]:
    """The same names, where the second "f" is called "f_2"."""
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True)]
