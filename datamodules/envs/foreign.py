"""Vectors of environments that this project did not make: what they return is checked in every step."""

from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from datamodules.envs.boundary import ADDED, Boundary, has_episodes, without
from datamodules.envs.masks import VectorWithoutMasks
from datamodules.envs.misfits import misfit
from datamodules.envs.tensors import AsArrays, returns_tensors
from rl_modules.checkpoints import space_brief
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves
from rl_modules.common.spaces import SPACES


class ForeignBoundary(Boundary):
    """Resets and steps a user's vector or an engine."""

    has_episodes = False

    def __init__(self, envs: VectorEnv, name: str) -> None:
        super().__init__(envs, name)
        self._misfit, self._misfit_of_batch = misfit(self.space), misfit(self.space, (envs.num_envs,))
        # Whether an episode has ended in a step in which the vector reset.
        self._has_ended = False

    def reset(self, **arguments: Any) -> Any:
        observation, info = self.reset_with_infos(**arguments)
        self._require(self._misfit_of_batch(observation))
        merges = isinstance(info, dict) and isinstance(self.envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        if merges and self.mode == AutoresetMode.SAME_STEP and (taken := sorted(ADDED.intersection(info))):
            raise UsageError(
                f"the environments of {self.name} return {', '.join(taken)} in the infos of a reset, "
                "where Gymnasium puts those of an episode's end; call them otherwise"
            )
        return observation

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        returned: Any = super().step(action)
        if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
            raise UsageError(
                f"step of {self.name} must return observations, rewards, terminated, truncated and a "
                f"dictionary of infos, not {str(returned)[:80]}"
            )
        observation, *rows, info = returned
        self._require(self._misfit_of_batch(observation))
        rows = [self._row(*pair) for pair in zip(("reward", "terminated", "truncated"), rows, strict=True)]
        if self.mode != AutoresetMode.SAME_STEP:
            info = without(ADDED, info)  # an environment's own
        return observation, *rows, info

    def finals(self, done: np.ndarray, observation: Any, info: dict[str, Any]) -> list[tuple[int, Any]]:
        if self.mode == AutoresetMode.SAME_STEP:
            final = self.final(info)
            if not self._has_ended:
                self._has_ended = True
                self._require_own_memory(final, done)
        ended = super().finals(done, observation, info)
        for _, one in ended:
            self._require(self._misfit(one))
        return ended

    def final(self, info: dict[str, Any], batched: bool = False) -> Any:
        """Returns the final observations of a step in which the vector reset; ``batched``: checked as a batch."""
        if info.get("final_obs") is None:
            raise UsageError(
                f"the environment {self.name} resets in the step in which an episode ends, and its infos "
                "have no final_obs; put the batch of final observations there, or reset in the next step "
                "and say so in metadata['autoreset_mode']"
            )
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
            raise UsageError(
                f"the environment {self.name} returned {what} of shape {tuple(row.shape)} and dtype "
                f"{row.dtype}; it must be {self.envs.num_envs} {kind}"
            )
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
                raise UsageError(
                    f"the environment {self.name} returns the same array in every step, which "
                    "SyncVectorEnv does not copy before it resets, so that its final_obs is the "
                    "observation after the reset; return a copy (state.copy()), or give it "
                    "AutoresetMode.NEXT_STEP"
                )


# ---------------------------------------------------------------- environments of evaluation


def evaluation_vector(environments: Any, made: VectorEnv) -> VectorEnv:
    """Returns a vector of the user's, made for an evaluation, as one of arrays and without masks of its own."""
    if made is environments._made:
        raise UsageError(
            f"{environments.name} was given as one vector, in which training steps: it can't be evaluated "
            "meanwhile; give a callable that makes it, or eval_freq=0"
        )
    made = made if environments._mask_source is None else VectorWithoutMasks(made)
    return AsArrays(made) if returns_tensors(made, environments.seed) else made


def require_same_spaces(environments: Any, envs: VectorEnv, evaluates: bool) -> None:
    """Refuses a vector of evaluation, or an engine of training, with other spaces than the other, bounds aside."""
    for name in SPACES:
        pair = space_brief(getattr(environments, name)), space_brief(getattr(envs, f"single_{name}"))
        trained, evaluated = pair if evaluates else reversed(pair)
        if trained != evaluated:
            raise UsageError(
                f"eval_env_kwargs and eval_wrappers make environments with the {name} {evaluated}, in "
                f"training it is {trained}; the policy needs the same"
            )


def boundary_of(envs: VectorEnv, name: str) -> Boundary:
    """Returns what resets and steps a vector."""
    if has_episodes(envs):
        return Boundary(envs, name)
    return ForeignBoundary(envs, name)
