"""Episodes that are seeded one by one and can be repeated."""

import copy
from typing import Any

import gymnasium as gym
import numpy as np


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
        observation, reward, terminated, truncated, info = self.env.step(action)
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
        observation, info = self.env.reset(seed=seed, options=options)
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
