"""Numbering the observations of environments whose observations are tuples of small numbers."""

from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rl_modules.common.errors import UsageError


class FlattenDiscrete(gym.ObservationWrapper, gym.utils.RecordConstructorArgs):
    """Numbers the combinations of a Tuple of Discrete, a MultiDiscrete or a MultiBinary; the last part counts fastest.

    Blackjack's (sum 0-31, dealer's card 0-10, ace 0-1) becomes Discrete(704): ``(sum * 11 + card) * 2 + ace``.

    Args:
        env: environment with such observations.

    Raises:
        UsageError: another observation space, or more than 10 million combinations.
    """

    def __init__(self, env: gym.Env) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
        space = env.observation_space
        if isinstance(space, spaces.Tuple) and all(isinstance(part, spaces.Discrete) for part in space):
            sizes, starts = [int(part.n) for part in space], [int(part.start) for part in space]
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            sizes, starts = space.nvec.tolist(), space.start.tolist()
        elif isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
            sizes, starts = [2] * space.shape[0], [0] * space.shape[0]
        else:
            raise UsageError(
                f"FlattenDiscrete numbers a Tuple of Discrete, a MultiDiscrete or a MultiBinary, not the "
                f"observation space {space}"
            )
        combinations = 1
        for size in sizes:
            combinations *= size
        if combinations > 10_000_000:
            raise UsageError(
                f"the observation space {space} has {combinations:,} combinations, too many for a table "
                "(10,000,000 at most)"
            )
        self._sizes, self._starts = sizes, starts
        self.observation_space = spaces.Discrete(combinations)

    def observation(self, observation: Any) -> int:
        """Returns the number of one combination."""
        number = 0
        for part, size, start in zip(observation, self._sizes, self._starts, strict=True):
            number = number * size + int(part) - start
        return number
