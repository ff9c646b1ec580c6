"""Environments in JAX, such as those of Brax and MuJoCo Playground, as a vector of torch tensors."""

import os
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from datamodules.envs.tensors import space_of
from rl_modules.common.errors import UsageError
from rl_modules.core.state import pack, unpack


def import_jax() -> Any:
    """Returns the module, which must not take three quarters of the GPU's memory at its first array."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


class JaxVector(VectorEnv):
    """N environments in one compiled program, which share the memory of their tensors with torch.

    An episode that ends begins anew in the same step, from a new state of ``reset``; its final observation is in the
    infos, so that the value after a time limit is that of the true successor.

    Args:
        env: what Brax and MuJoCo Playground call an environment: ``reset(key)`` and ``step(state, action)`` return a
            state with ``obs``, ``reward`` and ``done``; ``action_size`` numbers in [-1, 1] are an action.
        num_envs: N.
        episode_length: steps after which an episode is truncated.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}  # noqa: RUF012 (Gymnasium reads it)

    def __init__(self, env: Any, num_envs: int = 128, episode_length: int = 1000) -> None:
        self.num_envs, self.episode_length = num_envs, episode_length
        jax = self._jax = import_jax()
        jnp = jax.numpy
        reset, step = jax.vmap(env.reset), jax.vmap(env.step)

        def begin(key: Any) -> Any:
            key, new = jax.random.split(key)
            return reset(jax.random.split(new, num_envs)), jnp.zeros(num_envs, jnp.int32), key

        def follow(state: Any, steps: Any, key: Any, action: Any) -> Any:
            following, steps = step(state, action), steps + 1
            terminated, truncated = following.done > 0, steps >= episode_length
            done = terminated | truncated
            key, new = jax.random.split(key)
            # A reset takes longer than a step: it is computed in steps with an episode's end alone.
            fresh = jax.lax.cond(done.any(), lambda: reset(jax.random.split(new, num_envs)), lambda: following)

            def chosen(old: Any, new: Any) -> Any:
                if old.shape[:1] != (num_envs,):  # MuJoCo's empty parts
                    return old
                return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            state = jax.tree.map(chosen, following, fresh)
            return (state, jnp.where(done, 0, steps), key), (following.obs, following.reward, terminated, truncated)

        self._begin, self._follow = jax.jit(begin), jax.jit(follow)
        self._now: Any = self._begin(jax.random.PRNGKey(0))
        self.single_observation_space = space_of(self._now[0].obs)
        self.single_action_space = spaces.Box(-1.0, 1.0, (int(env.action_size),), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        key = self._now[2] if seed is None else self._jax.random.PRNGKey(int(np.ravel(seed)[0]) % 2**31)
        self._now = self._begin(key)
        return self._tensors(self._now[0].obs), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self._now, returned = self._follow(*self._now, self._jax.numpy.from_dlpack(actions.detach().contiguous()))
        final, reward, terminated, truncated = self._tensors(returned)
        return self._tensors(self._now[0].obs), reward, terminated, truncated, {"final_obs": final}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        return {"leaves": [pack(np.asarray(leaf)) for leaf in self._jax.tree.leaves(self._now)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here, kinds = self._jax.tree.flatten(self._now)
        if len(here) != len(state["leaves"]):
            raise UsageError(
                f"the checkpoint holds {len(state['leaves'])} arrays of the environments' state, this "
                f"simulator has {len(here)}; resume with the version that it was written with"
            )
        leaves = [
            self._jax.numpy.asarray(unpack(saved, np.array(leaf), "vector"))
            for saved, leaf in zip(state["leaves"], here, strict=True)
        ]
        self._now = self._jax.tree.unflatten(kinds, leaves)

    def _tensors(self, values: Any) -> Any:
        """Arrays of JAX as tensors in the same memory, which nothing may write into."""
        return self._jax.tree.map(torch.from_dlpack, values)


def brax(name: str, num_envs: int = 128, episode_length: int = 1000, **arguments: Any) -> JaxVector:
    """Makes environments of Brax, as ``env_id: datamodules.envs.jax:brax`` with ``env_kwargs: {name: ant}``.

    Args:
        name: of the environment, such as ``ant``.
        num_envs: how many step together.
        episode_length: steps after which an episode is truncated.
        **arguments: of the environment, such as ``backend``.
    """
    import_jax()
    from brax import envs

    return JaxVector(envs.get_environment(name, **arguments), num_envs, episode_length)


def playground(name: str, num_envs: int = 128, episode_length: int = 1000, **overrides: Any) -> JaxVector:
    """Makes environments of MuJoCo Playground, as ``env_id: datamodules.envs.jax:playground``.

    Args:
        name: of the environment, such as ``CartpoleBalance``.
        num_envs: how many step together.
        episode_length: steps after which an episode is truncated.
        **overrides: of the environment's configuration, such as ``impl: jax``.
    """
    import_jax()
    from mujoco_playground import registry

    return JaxVector(registry.load(name, config_overrides=overrides), num_envs, episode_length)
