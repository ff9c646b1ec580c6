"""Episodes that are seeded one by one and can be repeated: those of a run are saved as seeds and actions."""

import contextlib
import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from datamodules.envs.boundary import ADDED, require_fit, without
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import MASK, mask_size

_ARRAYS = (np.ndarray, torch.Tensor)
_RETURNS = {
    2: "reset returns (observation, info), and that of the old Gym the observation alone",
    5: "step returns (observation, reward, terminated, truncated, info), and that of the old Gym done in place of two",
}
#: Actions of an episode, or of a game, that are kept: a longer one is not repeated where a run resumes.
LONGEST = 100_000
# Infos by which a vector says that an episode ended, and which of its environments have `is_success`.
_NOT_OWN = ADDED | {"_is_success"}


def episode_seed(stream: int, episode: int) -> int:
    """Returns the seed of one episode: a function of its environment's stream and its number, nothing else."""
    return int(np.random.SeedSequence([stream, episode]).generate_state(1)[0])


class SeededEpisodes(gym.Wrapper):
    """Seeds every episode from the environment's stream, and records its actions.

    ``reset(seed=s)`` starts stream ``s`` at episode 0, ``reset()`` begins the next; episode k has its own seed.
    Setting ``episode_state``, of stream, number and actions, repeats an episode, or a game whose lives are episodes, of
    at most :data:`LONGEST` actions; with ``resets_next`` the next step resets. ``expects_no_masks``: a mask after a
    step is refused.
    """

    def __init__(self, env: gym.Env, expects_no_masks: bool = False) -> None:
        super().__init__(env)
        self._refuses_masks = expects_no_masks and mask_size(env.action_space) is not None
        self._stream = 0
        self._episode = 0
        self._first_episode = 0
        # Those of the current episode or game are its first `_n_actions` rows, up to LONGEST of them.
        self._actions: np.ndarray = np.empty(0)
        self._n_actions = 0
        self._resets: list[int] = []
        self._resets_next = False
        self._has_lives = env.has_wrapper_attr("continues_game")
        self._last_observation: Any = None
        #: What is compared with the space the first time that it comes.
        self._unseen = {"reset", "step", "end"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode, or episode 0 of a new stream: seeds the environment and its spaces, and resets."""
        if seed is not None:
            self._stream, self._episode = seed, -1
            self._leave_game()
        self._episode += 1
        self._resets_next = False
        seed = episode_seed(self._stream, self._episode)
        # Some environments draw from their spaces, which a reset does not seed.
        self.unwrapped.action_space.seed(seed)
        self.unwrapped.observation_space.seed(seed)
        returned: Any = self.env.reset(seed=seed, options=options)
        try:
            observation, info = returned
            is_own = _NOT_OWN.isdisjoint(info)
        except (TypeError, ValueError) as error:
            raise self._refusal(returned, 2) from error
        if "reset" in self._unseen:
            if observation is None or not isinstance(info, dict):
                raise self._refusal(returned, 2)
            require_fit(self._name, self.observation_space, observation)
            self._unseen.remove("reset")
        self._last_observation = observation
        if self._has_lives and self.env.get_wrapper_attr("continues_game"):
            self._resets.append(self._n_actions)
        else:
            self._first_episode, self._n_actions, self._resets = self._episode, 0, []
        return observation, info if is_own else without(_NOT_OWN, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._resets_next:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        n = self._n_actions
        if n < LONGEST:
            if n == len(self._actions):
                self._make_room(action)
            # A copy: environments may scale or clip an action in place, and would do so again when it is repeated.
            self._actions[n] = action
        self._n_actions = n + 1
        returned: Any = self.env.step(action)
        try:
            observation, reward, terminated, truncated, info = returned
            is_own = _NOT_OWN.isdisjoint(info)
        except (TypeError, ValueError) as error:
            raise self._refusal(returned, 5) from error
        if self._unseen:
            self._look_at(returned)
        if isinstance(reward, _ARRAYS):
            reward = reward.item()
        terminated, truncated = bool(terminated), bool(truncated)
        if self._refuses_masks and MASK in info:
            raise UsageError(
                "the environment's info has an action_mask after a step, but had none after the reset; "
                "give one there too, or data.action_masks=false"
            )
        if terminated or truncated:
            # An environment that returns the same objects each time overwrites them in the reset that follows.
            observation, info = copy.deepcopy(observation), dict(info)
        self._last_observation = observation
        return observation, reward, terminated, truncated, info if is_own else without(_NOT_OWN, info)

    def _look_at(self, returned: Any) -> None:
        """Compares the first step with the space, and the first end, whose observation no vector stores in an array."""
        observation, _, terminated, truncated, info = returned
        kind = "end" if terminated or truncated else "step"
        if kind in self._unseen:
            if not isinstance(info, dict):
                raise self._refusal(returned, 5)
            require_fit(self._name, self.observation_space, observation)
            for what, value in (("terminated", terminated), ("truncated", truncated)):
                if value not in (0, 1):
                    raise UsageError(f"step of {self._name} returned {what}={value!r}; it must be true or false")
            self._unseen.remove(kind)

    def _refusal(self, returned: Any, n: int) -> UsageError:
        return UsageError(f"{self._name} returned {str(returned)[:160]}; Gymnasium's {_RETURNS[n]}")

    @property
    def _name(self) -> str:
        kind = type(self.unwrapped)
        return f"{kind.__module__}:{kind.__name__}"

    def _make_room(self, action: Any) -> None:
        like = np.asarray(action)
        rows = np.empty((max(64, 2 * len(self._actions)), *like.shape), like.dtype)
        rows[: len(self._actions)] = self._actions if len(self._actions) else rows[:0]
        self._actions = rows

    def _leave_game(self) -> None:
        """Have the next reset begin a new game."""
        if self._has_lives:
            self.env.set_wrapper_attr("begins_anew", True)

    @property
    def episode_state(self) -> dict[str, Any]:
        """Stream, number and actions of the current episode, or of the game that it is part of."""
        if self._n_actions > LONGEST:
            return {"stream": self._stream, "episode": self._episode, "actions": (), "is_long": True}
        actions = self._actions[: self._n_actions].copy()
        state = {"stream": self._stream, "episode": self._first_episode, "actions": actions}
        if self._resets_next:
            state["resets_next"] = True
        return {**state, "resets": list(self._resets)} if self._resets else state

    @episode_state.setter
    def episode_state(self, state: dict[str, Any]) -> None:
        self._stream, self._episode = state["stream"], state["episode"] - 1
        self._leave_game()
        self.reset()
        for i, action in enumerate(state["actions"]):
            if i in state.get("resets", ()):
                self.reset()
            self.step(action)
        if len(state["actions"]) in state.get("resets", ()):
            self.reset()
        self._resets_next = state.get("resets_next", False)

    @property
    def last_observation(self) -> Any:
        """What the environment returned last."""
        return self._last_observation


# ---------------------------------------------------------------- those of a vector


def episode_states(envs: Any) -> list[dict[str, Any]]:
    """Stream, number and actions of every running episode, as plain data."""
    return [
        {**episode, "actions": torch.from_numpy(episode["actions"]) if len(episode["actions"]) else None}
        for episode in envs.get_attr("episode_state")
    ]


def episode_states_or_none(envs: Any) -> list[dict[str, Any]] | None:
    """:func:`episode_states`; None where the environments failed or were interrupted in a step."""
    closed, pending = gym.error.ClosedEnvironmentError, gym.error.AlreadyPendingCallError
    with contextlib.suppress(gym.error.Error, closed, pending, OSError, EOFError):
        return episode_states(envs)
    return None
