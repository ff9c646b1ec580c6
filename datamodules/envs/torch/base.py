"""Base of the environments in torch."""

from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor


class TorchEnv(VectorEnv):
    """N environments whose states are one tensor; an episode that ends begins anew in the same step.

    A subclass sets ``single_observation_space`` and ``single_action_space`` and defines :meth:`initial`,
    :meth:`transition` and, where observations are not the states, :meth:`observe`. These are functions of tensors: they
    change nothing in place and read nothing back to the host. A training step with ``graph=True`` can then be replayed.

    Args:
        num_envs: N.
        max_episode_steps: steps after which an episode is truncated; None: never.
        device: where the states are; the Trainer moves them to the policy's.
        dtype: of real states: ``float32`` or ``float64``, in which Gymnasium computes.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}  # noqa: RUF012 (Gymnasium reads it)
    single_observation_space: spaces.Space
    single_action_space: spaces.Space

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
        dtype: str = "float32",
    ) -> None:
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Moves the environments to a device, where they must be reset."""
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(0)
        #: States, [N, …], and steps of the running episodes, [N]: buffers that are written in place.
        self.state = self.initial(self.generator)
        self.steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    # ---------------------------------------------------------------- what an environment is

    def initial(self, generator: torch.Generator) -> Tensor:
        """Returns N first states of episodes, [N, …]."""
        raise NotImplementedError

    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the next states [N, …], the rewards [N], and whether the next states are terminal [N]."""
        raise NotImplementedError

    def observe(self, state: Tensor) -> Tensor:
        """Returns the observations of states, [N, *obs], in memory of their own."""
        return state.to(torch.float32, copy=True)

    # ---------------------------------------------------------------- Gymnasium's interface

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(int(seed if isinstance(seed, int) else next(iter(seed))))
        self.state.copy_(self.initial(self.generator))
        self.steps.zero_()
        return self.observe(self.state), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        following, reward, terminated = self.transition(self.state, actions)
        steps = self.steps + 1
        if self.max_episode_steps is None:
            truncated = torch.zeros_like(terminated)
        else:
            truncated = steps >= self.max_episode_steps
        done = terminated | truncated
        chosen = done.reshape(-1, *[1] * (following.dim() - 1))
        self.state.copy_(torch.where(chosen, self.initial(self.generator), following))
        self.steps.copy_(torch.where(done, 0, steps))
        return self.observe(self.state), reward, terminated, truncated, {"final_obs": self.observe(following)}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        return {
            "state": self.state.cpu().clone(),
            "steps": self.steps.cpu().clone(),
            "generator": self.generator.get_state(),
            "device": self.device.type,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.copy_(state["state"])
        self.steps.copy_(state["steps"])
        if state["device"] == self.device.type:  # another kind of device has other random streams
            self.generator.set_state(state["generator"].cpu())
