"""Environments of Isaac Lab and of those with its interface, such as mjlab, as a vector of torch tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from datamodules.envs.tensors import space_of
from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_map

#: The group of observations that a policy reads in Isaac Lab, and in mjlab.
POLICY = ("policy", "actor")


class IsaacVector(VectorEnv):
    """N environments of a ``ManagerBasedRLEnv`` or a ``DirectRLEnv``, on the simulator's device.

    The final observation of an episode is the simulator's own, so that the value after a time limit is that of the true
    successor. Where the configuration says ``is_finite_horizon``, the time limit belongs to the task and is an end.

    Args:
        env: the environment, or Gymnasium's wrappers around it.
        group: which of its groups of observations a policy reads, one or several; by default ``policy`` or ``actor``.
        action_limit: bounds the actions, where the environment does not: SAC and TD3 need this.

    Raises:
        UsageError: the configuration keeps no final observations, or ``group`` names none of its groups.
    """

    def __init__(self, env: Any, group: str | Sequence[str] | None = None, action_limit: float | None = None) -> None:
        self.env, self.num_envs, cfg = env, int(env.unwrapped.num_envs), env.unwrapped.cfg
        mode = AutoresetMode(env.unwrapped.metadata.get("autoreset_mode", AutoresetMode.SAME_STEP))
        if not getattr(cfg, "auto_reset", True):
            mode = AutoresetMode.DISABLED
        if mode == AutoresetMode.SAME_STEP and not getattr(cfg, "compute_final_obs", False):
            name = "auto_reset=False" if hasattr(cfg, "auto_reset") else "compute_final_obs=True"
            raise UsageError(
                f"{type(env.unwrapped).__name__} resets in the step in which an episode ends and keeps no "
                "final observation, so that the value after a time limit would be unknown; set "
                f"{name} in its configuration"
            )
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self._is_cut = not getattr(cfg, "is_finite_horizon", False)
        self._now = env.reset()[0]
        self._group = next((x for x in POLICY if x in self._now), list(self._now)) if group is None else group
        if unknown := {self._group} - {*self._now} if isinstance(self._group, str) else {*self._group} - {*self._now}:
            raise UsageError(
                f"group={group!r} has {', '.join(sorted(unknown))}, and the observations of "
                f"{type(env.unwrapped).__name__} have the groups {', '.join(self._now)}"
            )
        self.single_observation_space = space_of(self._chosen(self._now))
        self.single_action_space = _bounded(env.unwrapped.single_action_space, action_limit)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is None or "reset_mask" not in options:
            self._now = self.env.reset(seed=None if seed is None else int(np.ravel(seed)[0]))[0]
        else:
            # A reset of some environments returns new observations of all; only the rows of those are taken.
            mask, before = options["reset_mask"], tree_map(torch.clone, self._now)
            after = self.env.unwrapped.reset(env_ids=mask.nonzero().flatten())[0]
            self._now = tree_map(lambda x, y: torch.where(mask.reshape(-1, *[1] * (x.dim() - 1)), x, y), after, before)
        return self._chosen(self._now), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self._now, reward, terminated, truncated, extras = self.env.step(actions)
        if not self._is_cut:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        final = {} if extras.get("final_obs") is None else {"final_obs": self._chosen(extras["final_obs"])}
        return self._chosen(self._now), reward, terminated, truncated, final

    def close_extras(self, **_: Any) -> None:
        self.env.close()

    def _chosen(self, observation: Any) -> Any:
        """The groups of observations that a policy reads."""
        one = isinstance(self._group, str)
        return observation[self._group] if one else {name: observation[name] for name in self._group}


def mjlab(name: str, num_envs: int = 1024, device: str | None = None, **arguments: Any) -> IsaacVector:
    """Makes environments of mjlab, as ``env_id: datamodules.envs.isaac:mjlab``.

    Args:
        name: of a registered task, such as ``Mjlab-Cartpole-Balance``.
        num_envs: how many step together.
        device: where they do; by default the GPU that torch uses, without one the CPU.
        **arguments: of :class:`IsaacVector`.
    """
    import mjlab.tasks  # noqa: F401 (registers the tasks)
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import load_env_cfg

    cfg = load_env_cfg(name)
    cfg.scene.num_envs, cfg.auto_reset = num_envs, False
    where = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    return IsaacVector(ManagerBasedRlEnv(cfg, device or where), **arguments)


def _bounded(space: Any, limit: float | None) -> spaces.Space:
    """A space of actions as Gymnasium's, with bounds in place of infinite ones."""
    if not isinstance(space, spaces.Space) or isinstance(space, spaces.Box):
        limit = np.inf if limit is None else limit
        low, high = (np.broadcast_to(np.asarray(x, np.float32), space.shape) for x in (space.low, space.high))
        return spaces.Box(np.maximum(low, -limit), np.minimum(high, limit), space.shape, np.float32)
    return space
