"""Returns and lengths of episodes, computed from rollouts, which may contain parts of episodes."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rl_modules.common.errors import UsageError
from rl_modules.core.state import Stateful, persistent


class EpisodeStatistics(Stateful):
    """Undiscounted returns and lengths of the running and of the last ``window`` finished episodes."""

    running_return: np.ndarray = persistent(lambda self: np.zeros(self.n_envs, np.float64))
    running_length: np.ndarray = persistent(lambda self: np.zeros(self.n_envs, np.int64))
    returns: deque[float] = persistent(lambda self: deque(maxlen=self.window))
    lengths: deque[int] = persistent(lambda self: deque(maxlen=self.window))
    #: ``is_success`` of the last episodes, 1 or 0; 0 too if an episode's end had no ``is_success``.
    successes: deque[float] = persistent(lambda self: deque(maxlen=self.window))
    #: Whether any episode's end had ``is_success``, including episodes outside the window.
    knows_success: bool = persistent(False)

    def __init__(self, n_envs: int, window: int) -> None:
        self.n_envs, self.window = n_envs, window
        #: Called with return and length of every finished episode, and its values of ``info_keywords``.
        self.on_finished: Callable[..., None] | None = None
        #: Keys that :meth:`ends_of` reads in the infos of an episode's end besides ``is_success``.
        self.info_keywords: tuple[str, ...] = ()

    def ends_of(self, done: np.ndarray, info: dict[str, Any]) -> list[list[Any]]:
        """Returns ``is_success`` and the values of ``info_keywords`` of each episode that ended in a step, in order."""
        final = info.get("final_info", info)
        return [
            [success, *(_noted(final, name, i) for name in self.info_keywords)]
            for i, success in successes(done, info).items()
        ]

    def update(
        self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray, ends: Sequence[Sequence[Any]] = ()
    ) -> None:
        """Adds a rollout: raw rewards [T, N] float64, ends and valid rows [T, N], what :meth:`ends_of` read."""
        self.successes.extend(success or 0.0 for success, *_ in ends)
        self.knows_success |= any(success is not None for success, *_ in ends)
        if not done.any():
            # Summed in order of time, as single steps would be.
            self.running_return = np.add.accumulate(
                np.concatenate([self.running_return[None], np.where(valid, reward, 0.0)])
            )[-1]
            self.running_length = self.running_length + valid.sum(0)
            return
        notes = iter(ends)
        for t in range(len(reward)):
            self.running_return += reward[t] * valid[t]
            self.running_length += valid[t]
            for i in np.flatnonzero(done[t]):
                self.returns.append(float(self.running_return[i]))
                self.lengths.append(int(self.running_length[i]))
                _, *noted = next(notes, (None,))
                if self.on_finished is not None:
                    self.on_finished(self.returns[-1], self.lengths[-1], *noted)
                self.running_return[i], self.running_length[i] = 0.0, 0

    def means(self, sum_over_ranks: Callable[[torch.Tensor], Any] | None = None) -> dict[str, float]:
        """Returns ``rollout/*``, the means over the last episodes, those of all ranks by ``sum_over_ranks``."""
        own = [
            np.sum(self.returns),
            np.sum(self.lengths),
            len(self.returns),
            np.sum(self.successes),
            len(self.successes),
            self.knows_success,
        ]
        sums = torch.tensor(own, dtype=torch.float64)
        if sum_over_ranks is not None:
            sums = sum_over_ranks(sums)
        reward, length, count, succeeded, ended, knows_success = sums.tolist()
        means = {"rollout/ep_rew_mean": reward / count, "rollout/ep_len_mean": length / count} if count else {}
        return {**means, "rollout/success_rate": succeeded / ended} if knows_success else means

    def forget(self, which: np.ndarray) -> None:
        """Begins new episodes in the environments chosen by a mask, [N]."""
        self.running_return[which], self.running_length[which] = 0.0, 0


def successes(done: np.ndarray, info: dict[str, Any]) -> dict[int, float | None]:
    """``is_success``, 1 or 0, of the environments whose episodes ended in a step; None where it is not known."""
    info = info.get("final_info", info)
    if "is_success" not in info:
        return dict.fromkeys(np.flatnonzero(done).tolist())
    said = np.asarray(info.get("_is_success", done), bool)
    return {int(i): _success(info["is_success"], int(i)) if said[i] else None for i in np.flatnonzero(done)}


def _success(values: Any, i: int) -> float | None:
    """One environment's ``is_success`` as a number; arrays of one element count as their element."""
    try:
        success = None if values[i] is None else float(np.asarray(values[i]).item())
        if success is None or math.isfinite(success):
            return success
        raise ValueError("it is no truth value")
    except (KeyError, TypeError, ValueError) as error:  # a vector collects dictionaries by their keys
        raise UsageError(
            f"the environments' infos have is_success={values!r} at the end of an episode; it must be "
            "true or false, or None where that is not known"
        ) from error


def _noted(info: dict[str, Any], name: str, i: int) -> Any:
    """One environment's value of a keyword at its episode's end: a number, a text or None."""
    known = info.get(f"_{name}")
    if name not in info or not (known is None or known[i]):
        there = ", ".join(sorted(key for key in info if not key.startswith(("_", "final_")))) or "none"
        raise UsageError(f"info_keywords names {name!r}, which the infos at an episode's end lack; they have {there}")
    value = info[name][i]
    value = value.item() if isinstance(value, np.ndarray | np.generic) and np.size(value) == 1 else value
    if not isinstance(value, bool | int | float | str | None):
        raise UsageError(
            f"info_keywords names {name!r}, which is {value!r} at an episode's end; it must be one number or a text"
        )
    return value
