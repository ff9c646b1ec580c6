"""Agents of a PettingZoo environment as a vector, the way SuperSuit makes one."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_modules.common.errors import UsageError


class AgentsVector(VectorEnv):
    """A vector whose infos are a list and whose spaces are those of one agent, as Gymnasium 1 has vectors.

    ``supersuit.pettingzoo_env_to_vec_env_v1`` and ``concat_vec_envs_v1`` make such vectors: every agent is an
    environment, all share one policy, and the agents of a game begin and end together. The final observation is in the
    agent's info, under ``terminal_observation``.

    Args:
        envs: what SuperSuit made.
    """

    def __init__(self, envs: Any) -> None:
        self.envs_of_agents = envs
        self.num_envs = envs.num_envs
        self.single_observation_space, self.single_action_space = envs.observation_space, envs.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**(envs.metadata or {}), "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = getattr(envs, "render_mode", None)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        small = None if seed is None else int(np.ravel(seed)[0]) % 2**31  # many games seed NumPy's old generator
        return self.envs_of_agents.reset(seed=small, options=options)[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.envs_of_agents.step(actions)
        terminated, truncated = terminated.astype(bool), truncated.astype(bool)
        info: dict[str, Any] = {}
        done = terminated | truncated
        if done.any():
            final = [infos[i].get("terminal_observation") for i in range(self.num_envs)]
            alone = [i for i in np.flatnonzero(done) if final[i] is None]
            if alone:
                raise UsageError(f"agent {alone[0]} ended before its game did (black_death=True), and the rows after "
                                 "that are no transitions; end the episodes of all agents together")  # fmt: skip
            info["final_obs"] = final
            info["_is_success"] = np.array(["is_success" in one for one in infos])
            if info["_is_success"].any():
                info["is_success"] = np.array([one.get("is_success", False) for one in infos])
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        return self.envs_of_agents.render()

    def close_extras(self, **kwargs: Any) -> None:
        self.envs_of_agents.close()


def as_vector(envs: Any) -> Any:
    """``envs``; a vector of agents as Gymnasium 1 has vectors."""
    if isinstance(envs, VectorEnv) and not hasattr(envs, "single_observation_space"):
        return AgentsVector(envs)
    return envs
