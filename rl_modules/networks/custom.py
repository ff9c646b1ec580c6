"""User-defined networks: made from an import path with arguments, and checked before a run starts."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.arguments import Custom
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import FORBIDDEN
from rl_modules.distributions import Distribution, as_distribution, make_distribution, parameter_count
from rl_modules.functional.checks import as_float
from rl_modules.networks.critics import LOG_STD_MAX, LOG_STD_MIN, ActionBounds, PolicyAndCritics, SquashedGaussianPolicy
from rl_modules.networks.imported import check_shape, class_name, in_dtype_of, make, run_on_zeros, shapes_of

# ---------------------------------------------------------------- feature extractors


# ---------------------------------------------------------------- whole networks


class CustomActorCritic(nn.Module):
    """A user's policy and value network.

    ``cls(observation_space, action_space, **init_args)`` receives observations as rollouts store them, and returns the
    policy and the value [B]; without a critic the policy alone. The policy is a distribution (this project's or
    ``torch.distributions``'), or the numbers that :func:`rl_modules.distributions.make_distribution` reads: logits, and
    for a Box the means and the log standard deviations, [B, 2A], or the means alone if the module has ``log_std``.
    """

    def __init__(
        self, given: Custom, observation_space: spaces.Space, action_space: spaces.Space, critic: bool = True
    ) -> None:
        super().__init__()
        self.action_space, self.critic = action_space, critic
        self.module = make("network", given, observation_space, action_space)
        out = run_on_zeros("network", self.module, observation_space)
        if critic and not (isinstance(out, tuple) and len(out) == 2 and getattr(out[1], "shape", None) == (2,)):
            raise UsageError(
                f"network: {class_name(self.module)} returned {shapes_of(out)} for 2 observations; it must "
                "return the policy and the value of shape (2,)"
            )
        policy = out[0] if isinstance(out, tuple) else out
        if isinstance(policy, Tensor) and policy.shape not in self._shapes:
            wanted = " or ".join(map(str, self._shapes))
            raise UsageError(
                f"network: {class_name(self.module)} returned a policy of shape {tuple(policy.shape)} for 2 "
                f"observations; the action space {action_space} needs {wanted}"
            )

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        width = parameter_count(self.action_space)
        if not isinstance(self.action_space, spaces.Box):
            return [(2, width)]
        return [(2, 2 * width), *([(2, width)] if isinstance(getattr(self.module, "log_std", None), Tensor) else [])]

    def forward(self, observation: Any) -> tuple[Distribution, Tensor]:
        out = self.module(in_dtype_of(self.module, observation))
        policy, value = out if isinstance(out, tuple) else (out, None)
        if isinstance(policy, Tensor):
            policy = self._distribution(as_float(policy))
        policy = as_distribution(policy)
        if not self.critic or value is None:
            return policy, policy.mode().new_zeros(len(policy.mode()), dtype=torch.float32)
        return policy, as_float(value)

    def _distribution(self, numbers: Tensor) -> Distribution:
        if isinstance(self.action_space, spaces.Box) and numbers.shape[-1] == 2 * parameter_count(self.action_space):
            mean, log_std = numbers.chunk(2, dim=-1)
            return make_distribution(self.action_space, mean, log_std)
        if not isinstance(self.action_space, spaces.Box):
            # A network may forbid actions by logits of -inf, which an entropy or a KL would multiply by 0.
            numbers = numbers.clamp(FORBIDDEN, -FORBIDDEN)
        return make_distribution(self.action_space, numbers, getattr(self.module, "log_std", None))


def custom_q_network(given: Custom, observation_space: spaces.Space, *shape: int) -> nn.Module:
    """Returns a user's network of action values, ``cls(observation_space, action_space, **init_args)``."""
    module = make("network", given, observation_space, spaces.Discrete(shape[-1]))
    check_shape("network", module, (2, *shape), observation_space)
    return CustomNetwork(module)


class CustomGaussianPolicy(SquashedGaussianPolicy):
    """A user's policy for SAC and its kin: from observations to mean and log standard deviation before tanh, [B, A]."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        mean, log_std = self.module(in_dtype_of(self.module, observation))
        return as_float(mean), as_float(log_std).clamp(LOG_STD_MIN, LOG_STD_MAX)


class CustomNetwork(nn.Module):
    """A user's action values, or policy for TD3 and DDPG: observations in its dtype, numbers in float32 at least."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Any) -> Tensor:
        return as_float(self.module(in_dtype_of(self.module, observation)))


class CustomCritics(nn.Module):
    """A user's critics, from observations and actions in [-1, 1]^A to action values, [K, B, n_outputs]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Any, action: Tensor, only_first: bool = False, frozen: bool = False) -> Tensor:
        # `frozen` spares work only: the algorithms ask for the gradients of the policy alone.
        observation = in_dtype_of(self.module, observation)
        q = as_float(self.module(observation, in_dtype_of(self.module, action)))
        return q[:1] if only_first else q


def custom_policy_and_critics(
    given: Custom,
    observation_space: spaces.Space,
    action_space: spaces.Box,
    bounds: ActionBounds,
    shape: tuple[int, int],
    gaussian: bool,
) -> PolicyAndCritics:
    """A user's ``cls(observation_space, action_space, **init_args)`` with the modules ``policy`` and ``critics``."""
    module: Any = make("network", given, observation_space, action_space)
    name = type(module).__name__
    out = run_on_zeros("network", module.policy, observation_space)
    parts = out if isinstance(out, tuple) else (out,)
    wanted = (2, bounds.width)
    if len(parts) != 1 + gaussian or any(getattr(part, "shape", None) != wanted for part in parts):
        kind = "mean and log standard deviation" if gaussian else "actions"
        raise UsageError(
            f"network: {name}.policy returned {shapes_of(out)} for 2 observations; it must return {kind} "
            f"of shape {wanted}"
        )
    policy = CustomGaussianPolicy(module.policy) if gaussian else CustomNetwork(module.policy)
    critics = custom_critics(f"network: {name}.critics", module.critics, observation_space, bounds.width, shape)
    return PolicyAndCritics(policy, critics, bounds)


def custom_critics(
    name: str, module: nn.Module, observation_space: spaces.Space, width: int, shape: tuple[int, int]
) -> Any:
    """A user's critics, which return [K, B, outputs], from ``shape``, K and outputs."""
    action = torch.zeros((2, width), dtype=torch.float32, device="cpu")
    q = run_on_zeros(name.partition(":")[0], module, observation_space, action)
    if getattr(q, "shape", None) != (shape[0], 2, shape[1]):
        raise UsageError(
            f"{name} returned {shapes_of(q)} for 2 observations; it must return a tensor "
            f"of shape {(shape[0], 2, shape[1])}: n_critics, batch, outputs per value"
        )
    return CustomCritics(module)


# ---------------------------------------------------------------- import paths
