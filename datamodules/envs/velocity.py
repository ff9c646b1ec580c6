"""Tasks that need memory: well-known ones without the velocities."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_modules.common.errors import UsageError

#: Where an observation holds velocities, by the environment's name without its version.
VELOCITIES = {
    "CartPole": [1, 3],
    "MountainCar": [1],
    "MountainCarContinuous": [1],
    "Pendulum": [2],
    "LunarLander": [2, 3, 5],
    "LunarLanderContinuous": [2, 3, 5],
}


class MaskVelocity(gym.ObservationWrapper, gym.utils.RecordConstructorArgs):
    """Sets the velocities in the observation to 0, as rl-baselines3-zoo's ``MaskVelocityWrapper``.

    Raises:
        UsageError: an environment whose velocities are not known.
    """

    def __init__(self, env: gym.Env) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
        name = "" if env.spec is None else env.spec.name
        if name not in VELOCITIES or not isinstance(env.observation_space, spaces.Box):
            raise UsageError(
                f"wrappers: MaskVelocity knows the velocities of {', '.join(VELOCITIES)}, not of {name or env}"
            )
        self._kept = np.ones(env.observation_space.shape, env.observation_space.dtype)
        self._kept[VELOCITIES[name]] = 0

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Returns the observation without velocities."""
        return observation * self._kept
