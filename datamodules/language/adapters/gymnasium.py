"""Gymnasium environments whose observations are text.

environment: datamodules.language.adapters.gymnasium:GymnasiumEnvironment
environment_kwargs: {env_id: "my_package:Hangman-v0"}
"""

from typing import Any

import gymnasium as gym
from gymnasium import spaces

from datamodules.language.environments import Step
from datamodules.language.messages import Message
from rl_modules.common.errors import UsageError


class GymnasiumEnvironment:
    """A Gymnasium environment with ``Text`` observations, or any that are shown as text: each becomes a user message.

    With a ``Text`` action space the model's message is the action. With a ``Discrete`` one the message names an action:
    one of ``actions``, or a number; another message is answered by the list of actions, and takes no step.

    Not carried: other action spaces; ``info``.

    Args:
        env_id: id as for ``gymnasium.make``.
        env_kwargs: its keyword arguments.
        actions: names of the actions of a ``Discrete`` space, in order; None: their numbers.
    """

    def __init__(self, env_id: str, env_kwargs: dict[str, Any] | None = None, actions: list[str] | None = None) -> None:
        self.env = gym.make(env_id, **(env_kwargs or {}))
        space = self.env.action_space
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise UsageError(
                f"env_id={env_id!r} has the action space {space}; a model's message can be a Text or name "
                "a Discrete action"
            )
        numbers = [str(space.start + i) for i in range(int(space.n))] if isinstance(space, spaces.Discrete) else []
        if actions is not None and len(actions) != len(numbers):
            raise UsageError(f"actions={actions} names {len(actions)} actions, {env_id!r} has {len(numbers)}")
        self.names, self._start = actions or numbers, int(getattr(space, "start", 0))

    def reset(self, record: dict[str, Any]) -> list[Message]:
        """Resets with the record's ``start_seed``."""
        observation, _ = self.env.reset(seed=int(record.get("start_seed", 0)) % 2**31)
        return [{"role": "user", "content": str(observation)}]

    def step(self, message: Message) -> Step:
        """Takes the action that the message is or names."""
        action: Any = str(message.get("content") or "").strip()
        if self.names and action not in self.names:
            return [{"role": "user", "content": f"Answer with one of: {', '.join(self.names)}."}], 0.0, False
        action = self._start + self.names.index(action) if self.names else action
        if not self.names and not self.env.action_space.contains(action):
            return [{"role": "user", "content": f"The answer must fit {self.env.action_space}."}], 0.0, False
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return [{"role": "user", "content": str(observation)}], float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
