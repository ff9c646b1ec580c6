"""What environments return, checked once where it enters: shapes, dtypes, and names of infos."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from datamodules.envs.guard import raise_in_one_sentence
from datamodules.envs.restore import has_episodes
from rl_modules.common.errors import UsageError

#: Infos that Gymnasium's vectors add to those of their environments where an episode ended.
ADDED = frozenset(("final_obs", "_final_obs", "final_info", "_final_info"))
#: From an observation to what is wrong with it; None: nothing.
Misfit = Callable[[Any], str | None]


def misfit(space: spaces.Space, batch: tuple[int, ...] = (), part: str = "") -> Misfit:
    """Returns a function that says how an observation differs from its space, if it has another shape, or a dtype that
    Gymnasium's vectors do not convert (``same_kind``).

    Args:
        space: of one observation.
        batch: dimensions before those of the space.
        part: of a nested space, for the message.
    """
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


class Boundary:
    """Resets and steps a vector; an error in it, or what does not fit its spaces, is one sentence.

    Environments of :class:`~datamodules.envs.episodes.SeededEpisodes` check what they return before it is merged.

    Args:
        envs: the vector.
        name: the environment's, for messages.
    """

    def __init__(self, envs: VectorEnv, name: str) -> None:
        self.envs, self.name = envs, name
        self.mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        #: Whether it consists of single environments that know their episodes.
        self.has_episodes = has_episodes(envs)
        self._misfit = misfit(envs.single_observation_space)
        self._misfit_of_batch = misfit(envs.single_observation_space, (envs.num_envs,))

    def reset(self, **arguments: Any) -> Any:
        """Returns the observations after a reset of the vector."""
        try:
            observation, info = self.envs.reset(**arguments)
        except (Exception, SystemExit) as error:
            raise_in_one_sentence(self.envs, self.name, error)
        if not self.has_episodes:
            self._require(self._misfit_of_batch(observation))
            merges = isinstance(self.envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)
            if merges and self.mode == AutoresetMode.SAME_STEP and (taken := sorted(ADDED.intersection(info))):
                raise UsageError(f"the environments of {self.name} return {', '.join(taken)} in the infos of a reset, "
                                 "where Gymnasium puts those of an episode's end; call them otherwise")  # fmt: skip
        return observation

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Returns what a step of the vector returned; its infos have Gymnasium's own names only where it resets in the
        same step.
        """
        try:
            returned: Any = self.envs.step(action)
        except (Exception, SystemExit) as error:
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

    def final(self, info: dict[str, Any], batched: bool = False) -> Any:
        """Returns the final observations of the episodes that ended in a step in which the vector reset.

        Args:
            info: of the step.
            batched: they must be a batch, which is then checked.

        Raises:
            UsageError: its infos have none, or some that do not fit the space.
        """
        if info.get("final_obs") is None:
            raise UsageError(f"the environment {self.name} resets in the step in which an episode ends, and its infos "
                             "have no final_obs; put the batch of final observations there, or reset in the next step "
                             "and say so in metadata['autoreset_mode']")  # fmt: skip
        if batched:
            self._require(self._misfit_of_batch(info["final_obs"]))
        return info["final_obs"]

    def require_observation(self, observation: Any) -> None:
        """Refuses an observation of one environment that does not fit its space."""
        if not self.has_episodes:
            self._require(self._misfit(observation))

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
