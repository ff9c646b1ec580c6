"""Vectors of environments that this project did not make: their first reset, step and end are compared with a space."""

from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from datamodules.envs.boundary import ADDED, Boundary, has_episodes, require_fit, without
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves


class ForeignBoundary(Boundary):
    """Resets and steps a user's vector or an engine."""

    has_episodes = False

    def __init__(self, envs: VectorEnv, name: str) -> None:
        super().__init__(envs, name)
        self._batch_space = batch_space(self.space, envs.num_envs)
        self._has_reset = self._has_stepped = self._has_ended = False

    def reset(self, **arguments: Any) -> Any:
        observation, info = self.reset_with_infos(**arguments)
        if self._has_reset:
            return observation
        self._has_reset = True
        require_fit(self.name, self._batch_space, observation)
        merges = isinstance(info, dict) and isinstance(self.envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        if merges and self.mode == AutoresetMode.SAME_STEP and (taken := sorted(ADDED.intersection(info))):
            raise UsageError(
                f"the environments of {self.name} return {', '.join(taken)} in the infos of a reset, "
                "where Gymnasium puts those of an episode's end; call them otherwise"
            )
        return observation

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, *rows, info = super().step(action)
        rows = [row if isinstance(row, Tensor) else np.asarray(row) for row in rows]
        if not self._has_stepped:
            self._has_stepped = True
            require_fit(self.name, self._batch_space, observation)
            self._require_rows(rows, info)
        if self.mode != AutoresetMode.SAME_STEP:
            info = without(ADDED, info)  # an environment's own
        return observation, *rows, info

    def finals(self, done: np.ndarray, observation: Any, info: dict[str, Any]) -> list[tuple[int, Any]]:
        is_first = self.mode == AutoresetMode.SAME_STEP and not self._has_ended
        if self.mode == AutoresetMode.SAME_STEP:
            final = self._given(info)
            if is_first:
                self._require_own_memory(final, done)
        ended = super().finals(done, observation, info)
        self._has_ended = True
        for _, one in ended if is_first else ():
            require_fit(self.name, self.space, one)
        return ended

    def batch_of_finals(self, info: dict[str, Any]) -> Any:
        """Returns the batch of final observations of a step in which a vector of tensors reset."""
        final = self._given(info)
        if not self._has_ended:
            self._has_ended = True
            require_fit(self.name, self._batch_space, final)
        return final

    def _given(self, info: dict[str, Any]) -> Any:
        if info.get("final_obs") is None:
            raise UsageError(
                f"the environment {self.name} resets in the step in which an episode ends, and its infos "
                "have no final_obs; put the batch of final observations there, or reset in the next step "
                "and say so in metadata['autoreset_mode']"
            )
        return info["final_obs"]

    def _require_rows(self, rows: list[Any], info: Any) -> None:
        """Refuses rewards and ends that are not one real number of each environment, and infos of another kind."""
        n = self.envs.num_envs
        real = [not row.is_complex() if isinstance(row, Tensor) else row.dtype.kind in "biuf" for row in rows]
        if not (all(real) and all(row.shape == (n,) for row in rows) and isinstance(info, dict)):
            found = ", ".join(f"{row.dtype} {tuple(row.shape)}" for row in rows)
            raise UsageError(
                f"step of {self.name} must return observations, {n} rewards, terminated and truncated each, and a "
                f"dictionary of infos, not {found} and {type(info).__name__}"
            )

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


def boundary_of(envs: VectorEnv, name: str) -> Boundary:
    """Returns what resets and steps a vector."""
    return Boundary(envs, name) if has_episodes(envs) else ForeignBoundary(envs, name)
