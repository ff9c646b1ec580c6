"""Whole episodes of a policy, in separate environments."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from datamodules.envs.boundary import require_finite_evaluation
from datamodules.envs.episodes import episode_seed
from datamodules.envs.foreign import boundary_of
from datamodules.episode_statistics import successes
from datamodules.experience import evaluate_on_start
from rl_modules.common.masks import MASK

#: Seconds without an episode's end after which an evaluation says what bounds it.
SILENT_S = 10.0
#: Seconds between two calls of :attr:`Watch.tell`.
TOLD_EVERY_S = 1.0
_LIMIT = "data.wrappers=[{class_path: TimeLimit, init_args: {max_episode_steps: 1000}}]"


def has_time_limit(env: Any) -> bool:
    """Returns whether an environment declares a time limit."""
    spec = getattr(env, "spec", None)
    if getattr(spec, "max_episode_steps", None) is not None:
        return True
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            return True
        env = env.env
    return False


class Predicts(Protocol):
    """The interface of a policy that can be evaluated: Stable-Baselines3's ``predict``."""

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[np.ndarray, Any]: ...


def sampling_from(policy: Predicts, seed: int) -> AbstractContextManager[None]:
    """Returns the context in which a policy's ``predict`` samples from a separate stream, if it can."""
    draw = getattr(policy, "sampling_from", None)
    return nullcontext() if draw is None else draw(seed)


@dataclass
class Watch:
    """What others see of an evaluation.

    Attributes:
        cut: episodes of the last one that were cut.
        tell: called every second with the steps of the longest running episode; None: not called.
    """

    cut: int = 0
    tell: Callable[[int], None] | None = None


def run_episodes(
    policy: Predicts,
    envs: VectorEnv,
    streams: list[int],
    n_episodes: int,
    deterministic: bool = True,
    max_steps: int = 100_000,
    name: str | None = None,
    watch: Watch | None = None,
) -> dict[str, Tensor]:
    """Plays whole episodes, the same for the same ``streams``; each environment plays a number fixed beforehand.

    Returns ``return`` [E] float32, ``length`` [E] int64, ``seed`` [E] int64 where episodes are seeded one by one, and
    ``success`` [E] float32, 1 or 0, where one ended with ``is_success``. Episodes are cut after ``max_steps``.
    """
    watch = watch or Watch()
    watch.cut = 0
    n_envs, name = envs.num_envs, name or type(envs).__name__
    boundary = boundary_of(envs, name)
    quota = np.array([n_episodes // n_envs + (i < n_episodes % n_envs) for i in range(n_envs)])
    played = np.zeros(n_envs, np.int64)
    total, length = np.zeros(n_envs), np.zeros(n_envs, np.int64)
    episodes: dict[tuple[int, int], tuple[float, int, int, float | None]] = {}
    # A vector takes one seed; Gymnasium's vectors of single environments alone take a list.
    observation = boundary.reset(seed=streams if boundary.has_episodes else streams[0])
    require_finite_evaluation(name, "observation", observation)
    state: Any = None
    start = np.ones(n_envs, bool)
    resets = np.zeros(n_envs, bool)
    began_s = told_s = time.monotonic()
    while (played < quota).any():
        now_s = time.monotonic()
        if watch.tell is not None and now_s - told_s > TOLD_EVERY_S:
            watch.tell(int(length.max()))
            told_s = now_s
        if not episodes and now_s - began_s > SILENT_S:
            rank_zero_warn(
                f"no evaluation episode of {name} has ended after {SILENT_S:g} s, {length.max():,} steps; "
                f"each is cut after eval_max_steps={max_steps:,}: lower data.eval_max_steps, or give the "
                f"environment a time limit: {_LIMIT}"
            )
            began_s = float("inf")
        action, state = policy.predict(observation, state=state, episode_start=start, deterministic=deterministic)
        observation, reward, terminated, truncated, info = boundary.step(action)
        # A reset row of a next_step vector is no transition.
        reward = np.where(resets, 0.0, reward)
        require_finite_evaluation(name, "reward", reward)
        require_finite_evaluation(name, "observation", observation)
        total += reward
        length += ~resets
        done = np.asarray(terminated | truncated, bool)  # a vector of the user's may say 0 and 1
        endless = (length >= max_steps) & ~done & (played < quota)
        succeeded = successes(done, info) if done.any() else {}
        for i in np.flatnonzero(done | endless):
            if played[i] < quota[i]:
                seed = episode_seed(streams[i], int(played[i]))
                episodes[int(played[i]), int(i)] = (total[i], length[i], seed, succeeded.get(int(i)))
            played[i] = quota[i] if endless[i] else played[i] + 1
            total[i], length[i] = 0.0, 0
        if endless.any():
            watch.cut += int(endless.sum())
            rank_zero_warn(
                f"{endless.sum()} evaluation episodes were cut after eval_max_steps={max_steps:,} steps and "
                f"count as they are; lower data.eval_max_steps, or give the environment a time limit: {_LIMIT}"
            )
        if boundary.mode == AutoresetMode.NEXT_STEP:
            start, resets = resets, done
            observation = _allowing_all(observation, done)
        else:
            start = done
            if boundary.mode == AutoresetMode.DISABLED and done.any():
                observation = boundary.reset(options={"reset_mask": done})
                require_finite_evaluation(name, "observation", observation)
    rows = [episodes[key] for key in sorted(episodes)]
    found = {
        "return": torch.tensor([row[0] for row in rows], dtype=torch.float32),
        "length": torch.tensor([row[1] for row in rows], dtype=torch.int64),
    }
    if boundary.has_episodes:
        found["seed"] = torch.tensor([row[2] for row in rows], dtype=torch.int64)
    if any(row[3] is not None for row in rows):
        found["success"] = torch.tensor([row[3] or 0.0 for row in rows], dtype=torch.float32)
    return found


def _allowing_all(observation: Any, which: np.ndarray) -> Any:
    """Makes masks allow every action in the chosen rows, [N], in which an episode has ended and no action is used."""
    if not which.any() or not isinstance(observation, dict) or MASK not in observation:
        return observation
    mask = np.array(observation[MASK])
    mask[which] = 1
    return {**observation, MASK: mask}


# ---------------------------------------------------------------- when to evaluate

#: Trainers whose ``check_val_every_n_epoch`` a datamodule has set from its ``eval_freq``, with that number.
_evaluates_every: WeakKeyDictionary[Trainer, int] = WeakKeyDictionary()


def schedule_evaluations(
    trainer: Trainer, eval_freq: int, transitions_per_epoch: int, on_start: bool | None, has_limit: bool
) -> None:
    """Lets a Trainer evaluate after every ``eval_freq`` transitions, and at the start.

    Args:
        trainer: its own ``check_val_every_n_epoch`` and ``val_check_interval`` take precedence.
        eval_freq: transitions; 0: no evaluation.
        transitions_per_epoch: over all environments and ranks.
        on_start: evaluate before the first update; None: where ``eval_freq`` sets the times and episodes end.
        has_limit: whether the environment has a time limit.
    """
    given = trainer.check_val_every_n_epoch not in (1, _evaluates_every.get(trainer))
    # Lightning sets no number where the interval is a time.
    counts = eval_freq > 0 and not given and getattr(trainer, "val_check_interval", None) == 1.0
    starts = counts and has_limit if on_start is None else on_start
    evaluate_on_start(trainer, starts and eval_freq > 0)
    if counts:
        count_evaluations(trainer, eval_freq, transitions_per_epoch)


def count_evaluations(trainer: Trainer, eval_freq: int, transitions_per_epoch: int, again: bool = False) -> None:
    """Sets a Trainer's interval of evaluations from ``eval_freq``; ``again``: the length of epochs has changed."""
    if again and trainer.check_val_every_n_epoch != _evaluates_every.get(trainer, -1):
        return
    every = max(1, round(eval_freq / transitions_per_epoch))
    trainer.check_val_every_n_epoch = _evaluates_every[trainer] = every
