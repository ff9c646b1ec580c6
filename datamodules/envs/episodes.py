"""Episodes that are seeded one by one and can be repeated."""

import copy
from typing import Any

import gymnasium as gym
import numpy as np

from rl_modules.common.errors import UsageError


def episode_seed(stream: int, episode: int) -> int:
    """The seed of one episode: a function of its environment's stream and its number, nothing else."""
    return int(np.random.SeedSequence([stream, episode]).generate_state(1)[0])


class SeededEpisodes(gym.Wrapper):
    """Seeds every episode from the environment's stream, and records its actions.

    ``reset(seed=s)`` starts the stream ``s`` at its episode 0; ``reset()`` begins the next episode. Episode k is
    reset with ``episode_seed(s, k)``, so that it can be repeated alone. ``episode_state`` holds stream, number and
    actions; setting it repeats the episode up to there. Both work through the vector environments' ``get_attr`` and
    ``set_attr``, in this process or in others.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._stream = 0
        self._episode = 0
        self._actions: list[Any] = []
        self._last_observation: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._stream, self._episode = seed, 0
        else:
            self._episode += 1
        return self._begin(options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(action)
        returned = self.env.step(action)
        try:
            observation, reward, terminated, truncated, info = returned
        except (TypeError, ValueError) as error:
            raise UsageError(_old_step(returned, self.unwrapped)) from error
        if reward is None or isinstance(reward, str) or not isinstance(info, dict):
            wrong = "info" if not isinstance(info, dict) else "reward"
            value, kind = (info, "a dictionary") if wrong == "info" else (reward, "a number")
            raise UsageError(f"step of {_name(self.unwrapped)} returned {wrong}={value!r}; it must be {kind}")
        if terminated or truncated:
            # An environment that returns one buffer each time overwrites it in the reset that follows.
            observation = copy.deepcopy(observation)
        self._last_observation = observation
        return observation, reward, terminated, truncated, info

    def _begin(self, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._actions = []
        seed = episode_seed(self._stream, self._episode)
        # Some environments draw from their spaces, which a reset does not seed.
        self.unwrapped.action_space.seed(seed)
        self.unwrapped.observation_space.seed(seed)
        try:
            returned = self.env.reset(seed=seed, options=options)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise UsageError(f"reset of {_name(self.unwrapped)} must take the keywords seed and options, as Gymnasium "
                             f"calls it: {error}") from error  # fmt: skip
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
            raise UsageError(f"reset of {_name(self.unwrapped)} returned {_kind(returned)}; Gymnasium's reset returns "
                             "(observation, info), and that of the old Gym the observation alone")  # fmt: skip
        observation, info = returned
        self._last_observation = observation
        return observation, info

    @property
    def episode_state(self) -> dict[str, Any]:
        """Stream, number and actions of the current episode."""
        return {"stream": self._stream, "episode": self._episode, "actions": list(self._actions)}

    @episode_state.setter
    def episode_state(self, state: dict[str, Any]) -> None:
        self._stream, self._episode = state["stream"], state["episode"]
        self._begin()
        for action in state["actions"]:
            self.step(action)

    @property
    def last_observation(self) -> Any:
        """What the environment returned last."""
        return self._last_observation


def _name(env: gym.Env) -> str:
    return f"{type(env).__module__}:{type(env).__name__}"


def _kind(returned: object) -> str:
    return f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"


def _old_step(returned: object, env: gym.Env) -> str:
    return (f"step of {_name(env)} returned {_kind(returned)}; Gymnasium's step returns 5: observation, reward, "
            "terminated, truncated, info (the old Gym returned done in place of the two)")  # fmt: skip
