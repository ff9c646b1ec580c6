"""A user's policy and critics for DDPG, TD3, SAC, TQC and CrossQ."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.errors import UsageError
from rl_modules.common.import_path import Custom, make
from rl_modules.critics import LOG_STD_MAX, LOG_STD_MIN, ActionBounds, PolicyAndCritics, SquashedGaussianPolicy
from rl_modules.custom_networks import in_dtype_of, run_on_zeros, shapes_of
from rl_modules.layers import full_precision


class CustomGaussianPolicy(SquashedGaussianPolicy):
    """A user's policy for SAC and its kin: from observations to mean and log standard deviation before tanh, [B, A]."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        mean, log_std = self.module(in_dtype_of(self.module, observation))
        return full_precision(mean), full_precision(log_std).clamp(LOG_STD_MIN, LOG_STD_MAX)


class CustomPolicy(nn.Module):
    """A user's policy for TD3 and DDPG, from observations to actions in [-1, 1], [B, A]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Any) -> Tensor:
        return full_precision(self.module(in_dtype_of(self.module, observation)))


class CustomCritics(nn.Module):
    """A user's critics, from observations and actions in [-1, 1]^A to action values, [K, B, n_outputs].

    The arguments of :meth:`forward` are those of :class:`~rl_modules.critics.Critics`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Any, action: Tensor, only_first: bool = False, frozen: bool = False) -> Tensor:
        # `frozen` spares work only: the algorithms ask for the gradients of the policy alone.
        observation = in_dtype_of(self.module, observation)
        q = full_precision(self.module(observation, in_dtype_of(self.module, action)))
        return q[:1] if only_first else q


def custom_policy_and_critics(
    given: Custom,
    observation_space: spaces.Space,
    action_space: spaces.Box,
    bounds: ActionBounds,
    shape: tuple[int, int],
    gaussian: bool,
) -> PolicyAndCritics:
    """A user's ``cls(observation_space, action_space, **init_args)``, which has the modules ``policy`` and ``critics``.

    Args:
        given: as :func:`rl_modules.common.import_path.to_plain` returned it.
        observation_space: space of one observation.
        action_space: of one action.
        bounds: of the actions.
        shape: K and n_outputs of the critics.
        gaussian: whether the policy returns mean and log standard deviation instead of actions.

    Raises:
        UsageError: it can't be made, lacks a part, or a part returns another shape.
    """
    module: Any = make("network", given, observation_space, action_space)
    name = type(module).__name__
    for part in ("policy", "critics"):
        if not isinstance(getattr(module, part, None), nn.Module):
            raise UsageError(f"network: {name} must have the modules policy and critics; it has no {part}")
    out = run_on_zeros("network", module.policy, observation_space)
    parts = out if isinstance(out, tuple) else (out,)
    wanted = (2, bounds.width)
    if len(parts) != 1 + gaussian or any(getattr(part, "shape", None) != wanted for part in parts):
        kind = "mean and log standard deviation" if gaussian else "actions"
        raise UsageError(f"network: {name}.policy returned {shapes_of(out)} for 2 observations; it must return {kind} "
                         f"of shape {wanted}")  # fmt: skip
    action = torch.zeros(wanted, dtype=torch.float32, device="cpu")
    q = run_on_zeros("network", module.critics, observation_space, action)
    if getattr(q, "shape", None) != (shape[0], 2, shape[1]):
        raise UsageError(f"network: {name}.critics returned {shapes_of(q)} for 2 observations; it must return a tensor "
                         f"of shape {(shape[0], 2, shape[1])}: n_critics, batch, outputs per value")  # fmt: skip
    policy = CustomGaussianPolicy(module.policy) if gaussian else CustomPolicy(module.policy)
    critics: Any = CustomCritics(module.critics)
    return PolicyAndCritics(policy, critics, bounds)
