"""Checks for errors inside environments, each reported in one sentence."""

import traceback
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import tree_leaves


def raise_in_one_sentence(envs: VectorEnv, name: str, error: BaseException) -> NoReturn:
    """Converts an exception of a vector environment's ``reset`` or ``step`` to one sentence.

    Raises:
        UsageError: names the process that died instead of its broken pipe, or the line that raised.
    """
    if isinstance(error, UsageError):
        raise error
    processes = getattr(envs, "processes", [])
    if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
        dead = []
        for i, process in enumerate(processes):
            process.join(0.1)  # its end may not have been noticed yet
            if not process.is_alive():
                dead.append(f"{i} (exit code {process.exitcode})")
        _end(envs, processes)
        raise UsageError(f"the process of environment {', '.join(dead) or '?'} of {name} died; resume from the last "
                         "checkpoint with --resume") from error  # fmt: skip
    # The frame that called `exit()` is the environment's.
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename][-1]
    where = f"{place.filename}:{place.lineno}"
    if processes:
        where = "its own traceback stands above"
        _end(envs, processes)
    raise UsageError(f"the environment {name} raised {type(error).__name__}: {error} ({where}); fix it, then resume "
                     "from the last checkpoint with --resume") from error  # fmt: skip


def require_own_memory(envs: VectorEnv, name: str, final: Any, done: np.ndarray) -> None:
    """Refuses final observations that a reset has written over: Gymnasium's SyncVectorEnv does not copy what an
    environment returns, which may be the same array in every step.

    Args:
        envs: the vector, which reset in the step in which episodes ended.
        name: the environment's.
        final: final observations by environment.
        done: which episodes ended, [N] bool.

    Raises:
        UsageError: says how to return them.
    """
    inner = envs.unwrapped
    if not isinstance(inner, SyncVectorEnv) or not isinstance(final, np.ndarray) or final.dtype != object:
        return
    after_reset = getattr(inner, "_env_obs", [None] * len(final))
    for i in np.flatnonzero(done):
        parts = zip(tree_leaves(final[i]), tree_leaves(after_reset[i]), strict=False)
        shared = [np.shares_memory(*pair) for pair in parts if all(isinstance(x, np.ndarray) and x.size for x in pair)]
        if shared and all(shared):
            raise UsageError(f"the environment {name} returns the same array in every step, which SyncVectorEnv does "
                             "not copy before it resets, so that its final_obs is the observation after the reset; "
                             "return a copy (state.copy()), or give it AutoresetMode.NEXT_STEP")  # fmt: skip


def _end(envs: VectorEnv, processes: list[Any]) -> None:
    for process in processes:
        process.terminate()
    envs.closed = True  # closing would wait for answers that never come


def require_finite(name: str, observations: Any, reward: np.ndarray, finals: list[tuple[int, int, Any]]) -> None:
    """Refuses NaN and infinite values, which would make the network's weights NaN.

    Args:
        name: the environment's.
        observations: [T + 1, N, *obs] arrays, nested as the space is.
        reward: [T, N].
        finals: row, environment and final observation of every episode that ended.

    Raises:
        UsageError: names the environment and the row.
    """
    if not np.isfinite(reward).all():
        _refuse(name, "reward", ~np.isfinite(reward))
    for leaf in tree_leaves(observations):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            _refuse(name, "observation", ~np.isfinite(leaf).reshape(*leaf.shape[:2], -1).all(-1))
    for t, i, final in finals:
        if not all(np.isfinite(leaf).all() for leaf in tree_leaves(final)):
            bad = np.zeros(reward.shape, bool)
            bad[t, i] = True
            _refuse(name, "observation", bad)


def require_finite_evaluation(name: str, what: str, values: Any) -> None:
    """Refuses a step of an evaluation with a NaN or infinite reward or observation.

    Args:
        name: the environment's.
        what: ``reward`` or ``observation``.
        values: as the vector returned them: an array [N, …], or dictionaries and tuples of such.

    Raises:
        UsageError: names the environment.
    """
    if isinstance(values, dict | tuple):
        for part in values.values() if isinstance(values, dict) else values:
            require_finite_evaluation(name, what, part)
        return
    array = np.asarray(values)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        i = np.argwhere(~np.isfinite(array))[0, 0]
        raise UsageError(f"environment {i} of {name} returned a NaN or infinite {what} in an evaluation; the "
                         "evaluation has no result, and earlier checkpoints are untouched")  # fmt: skip


def _refuse(name: str, what: str, bad: np.ndarray) -> NoReturn:
    t, i = np.argwhere(bad)[0]
    raise UsageError(f"environment {i} of {name} returned a NaN or infinite {what} in row {t} of this rollout; nothing "
                     "was learned from it, and earlier checkpoints are untouched")  # fmt: skip
