"""A replay buffer of frame stacks that stores every frame once."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from datamodules.buffers import Batch, ReplayBuffer
from rl_modules.common.errors import UsageError


class FrameReplayBuffer(ReplayBuffer):
    """A buffer of stacks of k frames: a row is a frame, the stack is the rows r-k+1 … r, a new episode takes k."""

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, n_envs: int, buffer_size: int
    ) -> None:
        self.stack = stack_size(observation_space)
        self.incomplete = self.stack - 1  # they have lost frames of their stacks
        frame = spaces.Box(0, 1, observation_space.shape[1:], observation_space.dtype.type)  # type: ignore[index,union-attr]
        super().__init__(frame, action_space, n_envs, buffer_size)
        self.observation_bytes *= self.stack
        self._offsets = torch.arange(1 - self.stack, 1) * n_envs

    def break_off(self, which: np.ndarray) -> None:
        """Does nothing: a stack that does not continue the one before shows the break."""

    def _starts(self, rollout: Batch, valid: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Whether an observation begins an episode, [T, N]: its older frames are new. Refuses one that breaks off."""
        seen, after = rollout["observation"].numpy(), rollout["next_observation"].numpy()
        starts = np.zeros(valid.shape, bool)
        for i in range(self.n_envs):
            before: np.ndarray | None = None
            if self.filled:
                newest = self.head[i] * self.n_envs + i
                before = self.observations_at(newest[None])[0].numpy()[:-1]
            must_continue = False
            for t in np.flatnonzero(valid[:, i]):
                continues = before is not None and np.array_equal(seen[t, i, :-1], before)
                if must_continue and not continues:
                    self._refuse()
                starts[t, i] = not continues
                if ended[t, i] and not np.array_equal(after[t, i, :-1], seen[t, i, 1:]):
                    self._refuse()
                goes_on = t + 1 < len(valid) and valid[t + 1, i] and not ended[t, i]
                before, must_continue = (seen[t, i, 1:], True) if goes_on else (None, False)
        return starts

    def _begin_stacks(self, observation: Tensor, flat: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
        frames: Any = self.observation.numpy()
        padding = [(flat[starts] + offset) % self.total for offset in self._offsets[:-1].tolist()]
        for j, rows in enumerate(padding):
            frames[rows] = observation.numpy()[starts][:, j]
        # Where a new episode begins at once, the newest row has no successor.
        newest = (self.head.numpy() - 1) % self.rows * self.n_envs + np.arange(self.n_envs)
        return [*padding, newest[starts[0]]]

    def _newest(self, observation: Tensor) -> Tensor:
        return observation[:, :, -1]

    def _refuse(self) -> None:
        raise UsageError(
            "share_frames=True: an observation's older frames are not those of the observation before; "
            "put FrameStackObservation last among the wrappers, or leave share_frames out"
        )

    def observations_at(self, index: Tensor) -> Tensor:
        """Observations by their flat numbers, [M, k, *frame]."""
        stored: Tensor = self.observation
        return stored[(index[:, None] + self._offsets) % self.total]


def stack_size(space: spaces.Space) -> int:
    """Returns k of a space of frame stacks; refuses what is no Box of at least two axes."""
    if not isinstance(space, spaces.Box) or len(space.shape) < 2 or space.shape[0] < 2:
        raise UsageError(
            "share_frames=True stores frames of stacks, whose space is a Box with the stack as first "
            f"axis, not {space}; put FrameStackObservation last among the wrappers, or leave share_frames "
            "out"
        )
    return int(space.shape[0])
