"""What environments return, checked once where it enters: shapes, dtypes, numbers, names of infos, and errors."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import is_image, tree_leaves

#: Infos that Gymnasium's vectors add to those of their environments where an episode ended.
ADDED = frozenset(("final_obs", "_final_obs", "final_info", "_final_info"))
#: Observations after which mean and deviation are compared, and |mean| ÷ deviation from which a deviation has fewer
#: than eight steps of float32 (24 bits).
SEEN, LARGEST = 1000, 2.0**20
#: From an observation to what is wrong with it; None: nothing.
Misfit = Callable[[Any], str | None]


def misfit(space: spaces.Space, batch: tuple[int, ...] = (), part: str = "") -> Misfit:
    """Returns a function that says how an observation, behind dimensions ``batch``, differs from its space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys: Any = space.spaces if isinstance(space, spaces.Dict) else range(len(space.spaces))
        return _of_parts({key: misfit(space[key], batch, f"{part}[{key!r}]") for key in keys}, part)
    shape, dtype = (*batch, *(space.shape or ())), np.dtype(space.dtype)
    known: set[Any] = {dtype}  # dtypes of arrays, and types of numbers, that fit

    def leaf(observation: Any) -> str | None:
        kind = observation.__class__
        if (observation.shape == shape and observation.dtype in known) if kind is np.ndarray else kind in known:
            return None
        if isinstance(observation, Tensor):
            given: Any = observation.dtype
            found, fits = tuple(observation.shape), not observation.is_complex()
        else:
            try:
                array = np.asarray(observation)
            except ValueError:  # rows of several lengths
                array = np.asarray(None)
            if array.dtype == object:
                return f"the observation {str(observation)[:60]}, and its observation_space{part} has the shape {shape}"
            found, given = array.shape, array.dtype
            fits = np.can_cast(given, dtype, "same_kind")
            if fits and shape == found:
                known.add(kind if isinstance(observation, int | np.number) else given)
        if found != shape:
            return f"an observation of shape {found}, and its observation_space{part} has {shape}"
        return None if fits else f"an observation of dtype {given}, and its observation_space{part} has {dtype}"

    return leaf


def _of_parts(parts: dict[Any, Misfit], part: str) -> Misfit:
    def nested(observation: Any) -> str | None:
        for key, check in parts.items():
            try:
                value = observation[key]
            except (KeyError, IndexError, TypeError):
                return f"an observation without {key!r}, and its observation_space{part} has that"
            if wrong := check(value):
                return wrong
        return None

    return nested


def plain_number(value: Any) -> bool | int | float | None:
    """A number of Python, NumPy or torch, or an array of one, as Python's; None for anything else."""
    try:
        value = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # several
        return None
    return value if isinstance(value, bool | int | float) else None


def without(names: frozenset[str], info: dict[str, Any]) -> dict[str, Any]:
    """Infos without some names."""
    return info if names.isdisjoint(info) else {key: x for key, x in info.items() if key not in names}


def rows_of(batch: Any, n: int) -> list[Any]:
    """Returns the observations of each environment, from their batch."""
    if isinstance(batch, dict):
        parts = {name: rows_of(part, n) for name, part in batch.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(n)]
    if isinstance(batch, tuple):
        return list(zip(*(rows_of(part, n) for part in batch), strict=True))
    return [batch[i] for i in range(n)]


def has_episodes(envs: VectorEnv) -> bool:
    """Returns whether the vector consists of single environments that know their episodes; an engine's do not."""
    if not hasattr(envs, "get_attr"):
        return False
    with contextlib.suppress(Exception):
        if isinstance(envs, AsyncVectorEnv):  # a worker that is asked for an attribute it lacks ends
            return all(envs.call("has_wrapper_attr", "episode_state"))
        envs.get_attr("episode_state")
        return True
    return False


class Boundary:
    """Resets and steps a vector; an error in it, or what does not fit its spaces, is one sentence."""

    def __init__(self, envs: VectorEnv, name: str) -> None:
        self.envs, self.name, self.space = envs, name, envs.single_observation_space
        self.mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        #: Whether it consists of single environments that know their episodes.
        self.has_episodes = has_episodes(envs)
        self._misfit, self._misfit_of_batch = misfit(self.space), misfit(self.space, (envs.num_envs,))
        # Whether an episode has ended in a step in which the vector reset.
        self._has_ended = False

    def reset(self, **arguments: Any) -> Any:
        """Returns the observations after a reset of the vector."""
        try:
            observation, info = self.envs.reset(**arguments)
        except (Exception, SystemExit) as error:
            from datamodules.envs.failures import raise_in_one_sentence

            raise_in_one_sentence(self.envs, self.name, error)
        if not self.has_episodes:
            self._require(self._misfit_of_batch(observation))
            merges = isinstance(self.envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)
            if merges and self.mode == AutoresetMode.SAME_STEP and (taken := sorted(ADDED.intersection(info))):
                raise UsageError(f"the environments of {self.name} return {', '.join(taken)} in the infos of a reset, "
                                 "where Gymnasium puts those of an episode's end; call them otherwise")  # fmt: skip
        return observation

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Returns what a step returned; Gymnasium's own infos are there only where the vector resets in it."""
        try:
            returned: Any = self.envs.step(action)
        except (Exception, SystemExit) as error:
            from datamodules.envs.failures import raise_in_one_sentence

            raise_in_one_sentence(self.envs, self.name, error)
        if self.has_episodes:
            return returned
        if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
            raise UsageError(f"step of {self.name} must return observations, rewards, terminated, truncated and a "
                             f"dictionary of infos, not {str(returned)[:80]}")  # fmt: skip
        observation, *rows, info = returned
        self._require(self._misfit_of_batch(observation))
        rows = [self._row(*pair) for pair in zip(("reward", "terminated", "truncated"), rows, strict=True)]
        if self.mode != AutoresetMode.SAME_STEP:
            info = without(ADDED, info)  # an environment's own
        return observation, *rows, info

    def finals(self, done: np.ndarray, observation: Any, info: dict[str, Any]) -> list[tuple[int, Any]]:
        """Returns environment and final observation of each ended episode, of a vector without steps for resets."""
        final = observation
        if self.mode == AutoresetMode.SAME_STEP:
            final = self.final(info)
            if not self._has_ended:
                self._has_ended = True
                self._require_own_memory(final, done)
        if isinstance(final, dict) or (isinstance(final, tuple) and isinstance(self.space, spaces.Tuple)):
            final = rows_of(final, self.envs.num_envs)  # a batch, not one of each environment
        ended = [(int(i), final[i]) for i in np.flatnonzero(done)]
        if not self.has_episodes:
            for _, one in ended:
                self._require(self._misfit(one))
        return ended

    def final(self, info: dict[str, Any], batched: bool = False) -> Any:
        """Returns the final observations of a step in which the vector reset; ``batched``: checked as a batch."""
        if info.get("final_obs") is None:
            raise UsageError(f"the environment {self.name} resets in the step in which an episode ends, and its infos "
                             "have no final_obs; put the batch of final observations there, or reset in the next step "
                             "and say so in metadata['autoreset_mode']")  # fmt: skip
        if batched:
            self._require(self._misfit_of_batch(info["final_obs"]))
        return info["final_obs"]

    def _require(self, wrong: str | None) -> None:
        if wrong:
            raise UsageError(f"the environment {self.name} returned {wrong}; make them agree")

    def _row(self, what: str, value: Any) -> Any:
        """One real number of each environment, as an array or a tensor."""
        row = value if isinstance(value, Tensor) else np.asarray(value)
        is_real = not row.is_complex() if isinstance(row, Tensor) else row.dtype.kind in "biuf"
        if row.shape != (self.envs.num_envs,) or not is_real:
            kind = "numbers" if what == "reward" else "truth values"
            raise UsageError(f"the environment {self.name} returned {what} of shape {tuple(row.shape)} and dtype "
                             f"{row.dtype}; it must be {self.envs.num_envs} {kind}")  # fmt: skip
        return row

    def _require_own_memory(self, final: Any, done: np.ndarray) -> None:
        """Refuses final observations that a reset has written over, which SyncVectorEnv does not copy."""
        inner = self.envs.unwrapped
        if not isinstance(inner, SyncVectorEnv) or not isinstance(final, np.ndarray) or final.dtype != object:
            return
        after_reset = getattr(inner, "_env_obs", [None] * len(final))
        for i in np.flatnonzero(done):
            pairs = zip(tree_leaves(final[i]), tree_leaves(after_reset[i]), strict=False)
            shared = [np.shares_memory(*p) for p in pairs if all(isinstance(x, np.ndarray) and x.size for x in p)]
            if shared and all(shared):
                raise UsageError(f"the environment {self.name} returns the same array in every step, which "
                                 "SyncVectorEnv does not copy before it resets, so that its final_obs is the "
                                 "observation after the reset; return a copy (state.copy()), or give it "
                                 "AutoresetMode.NEXT_STEP")  # fmt: skip


# ---------------------------------------------------------------- numbers


def require_finite(name: str, observations: Any, reward: np.ndarray, finals: list[tuple[int, int, Any]]) -> None:
    """Refuses NaN and infinite observations [T + 1, N, *obs], rewards [T, N] and final observations."""
    what, bad = "reward", ~np.isfinite(reward)
    for leaf in () if bad.any() else tree_leaves(observations):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            what, bad = "observation", ~np.isfinite(leaf).reshape(*leaf.shape[:2], -1).all(-1)
    for t, i, final in () if bad.any() else finals:
        if not all(np.isfinite(leaf).all() for leaf in tree_leaves(final)):
            what, bad[t, i] = "observation", True
    if bad.any():
        t, i = np.argwhere(bad)[0]
        raise UsageError(f"environment {i} of {name} returned a NaN or infinite {what} in row {t} of this rollout; "
                         "nothing was learned from it, and earlier checkpoints are untouched")  # fmt: skip


def require_finite_evaluation(name: str, what: str, values: Any) -> None:
    """Refuses a step of an evaluation with a NaN or infinite ``reward`` or ``observation``."""
    if isinstance(values, dict | tuple):
        for part in values.values() if isinstance(values, dict) else values:
            require_finite_evaluation(name, what, part)
        return
    array = np.asarray(values)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        i = np.argwhere(~np.isfinite(array))[0, 0]
        raise UsageError(f"environment {i} of {name} returned a NaN or infinite {what} in an evaluation; the "
                         "evaluation has no result, and earlier checkpoints are untouched")  # fmt: skip


class Digits:
    """Warns once where float32 can't tell a run's first observations apart, unless they are normalised in float64."""

    def __init__(self, space: spaces.Space, name: str, in_double: bool) -> None:
        self.name, self.seen = name, 0
        kinds = [isinstance(x, spaces.Box) and x.dtype.kind == "f" and not is_image(x)
                 and not (in_double and x.dtype == np.float64) for x in _parts(space)]  # fmt: skip
        # A first observation, and sums of the differences from it and of their squares, of each part.
        self._sums: dict[int, Any] = {i: None for i, is_real in enumerate(kinds) if is_real}
        self.looks = bool(self._sums)

    def see(self, observation: Any) -> None:
        """Adds a batch, [B, *obs] in the dtypes of the environment."""
        leaves = tree_leaves(observation)
        self.seen += len(leaves[0])
        for i, sums in self._sums.items():
            x = leaves[i].astype(np.float64)
            first, total, squares = sums or (x[0], 0.0, 0.0)
            self._sums[i] = first, total + (x - first).sum(0), squares + ((x - first) ** 2).sum(0)
        if self.seen < SEEN:
            return
        self.looks = False
        for first, total, squares in self._sums.values():
            mean = np.atleast_1d(first + total / self.seen)
            deviation = np.atleast_1d(np.sqrt(np.maximum(squares / self.seen - (total / self.seen) ** 2, 0.0)))
            if (lost := (deviation > 0) & (np.abs(mean) > LARGEST * deviation)).any():
                at = tuple(np.argwhere(lost)[0])
                rank_zero_warn(f"observations of {self.name} vary by {deviation[at]:.2g} around {mean[at]:.7g}, which "
                               "float32 can't tell apart: return them in float64 in an observation_space of float64 "
                               "and set norm_obs=True, or subtract a constant in the environment")  # fmt: skip
                return


def _parts(space: spaces.Space) -> list[spaces.Space]:
    """The spaces of an observation's leaves, in order."""
    if isinstance(space, spaces.Dict):
        return [leaf for part in space.values() for leaf in _parts(part)]
    return [leaf for part in space for leaf in _parts(part)] if isinstance(space, spaces.Tuple) else [space]
