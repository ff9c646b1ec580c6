"""EnvPool's engines as Gymnasium vectors."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.spaces import space_brief


class EnvPoolVector(VectorEnv):
    """N environments of one of EnvPool's engines, written in C++.

    EnvPool resets in the step after an episode's end, whose action and reward are ignored; the last step of the episode
    returns the final observation. Its seeds are fixed when the engine is made: ``reset(seed=…)`` makes a new one. The
    running episodes can't be read from it, nor restored.

    Args:
        env_id: an id that EnvPool and Gymnasium both know.
        num_envs: number of environments.
        env_kwargs: EnvPool's own, such as ``max_episode_steps`` and ``num_threads``.

    Raises:
        UsageError: EnvPool is not installed, does not know the id, or has other spaces than Gymnasium.
    """

    def __init__(self, env_id: str, num_envs: int, env_kwargs: dict[str, Any] | None = None) -> None:
        try:
            import envpool
        except ImportError as error:
            raise UsageError("vectorization_mode='envpool' needs a package that is not installed: pip install "
                             "'lightning-rl-recipes[envpool]'") from error  # fmt: skip
        known = envpool.list_all_envs()
        env_id = env_id.removeprefix("ALE/") if env_id.startswith("ALE/") else env_id
        if env_id not in known:
            raise UsageError(f"env_id={env_id!r} has no engine in EnvPool{did_you_mean(env_id, known)}; use "
                             "vectorization_mode='sync' or 'async'")  # fmt: skip
        self._make = envpool.make
        self._arguments = {"task_id": env_id, "env_type": "gymnasium", "num_envs": num_envs, **(env_kwargs or {})}
        self._pool: Any = self._new_pool(0)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self._pool.spec.gymnasium_observation_space
        self.single_action_space = self._pool.spec.gymnasium_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def require_spaces(self, env: gym.Env) -> None:
        """Refuses an engine whose spaces differ from those of the environment that evaluation uses.

        Raises:
            UsageError: names both.
        """
        for name in ("observation_space", "action_space"):
            here, there = getattr(self, f"single_{name}"), getattr(env, name)
            if space_brief(here) != space_brief(there):
                raise UsageError(f"EnvPool's {self._arguments['task_id']} has the {name} {space_brief(here)}, "
                                 f"Gymnasium's {space_brief(there)}; use vectorization_mode='sync'")  # fmt: skip

    def _new_pool(self, seed: int) -> Any:
        seeds = np.random.SeedSequence(seed).generate_state(self._arguments["num_envs"]) >> 1
        try:
            return self._make(**self._arguments, seed=[int(s) for s in seeds])
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            raise UsageError(f"env_kwargs do not fit EnvPool's {self._arguments['task_id']}: {error}") from error

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._new_pool(int(np.ravel(seed)[0]))
        return self._pool.reset()[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *step, info = self._pool.step(np.asarray(actions))
        # Besides one value of each environment, the infos have EnvPool's numbers of environments and players.
        infos = {name: x for name, x in info.items() if np.shape(x)[:1] == (self.num_envs,) and name != "env_id"}
        return *step, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()
