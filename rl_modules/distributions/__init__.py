"""Action distributions with private random generators.

`torch.distributions` has no ``generator`` argument, and its checks cost more than the arithmetic of a small policy.
These are the same densities (the tests compare them), with the few methods that policy gradients need. ``S`` below
is the batch shape; every distribution is over one action per batch element, so ``log_prob``, ``entropy`` and ``kl``
have shape S, summed over the action's components.
"""

import math
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.distributions.categorical import Categorical


class Distribution(Protocol):
    """The interface of a policy's action distribution that the algorithms use."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per batch element, without gradient."""

    def mode(self) -> Tensor:
        """Returns the most likely action, shape as :meth:`sample`."""

    def log_prob(self, action: Tensor) -> Tensor:
        """Log π(a|s) in nats, shape S."""

    def entropy(self) -> Tensor:
        """Entropy in nats, shape S (differential for continuous actions)."""

    def kl(self, other: Any) -> Tensor:
        """KL(self || other) in nats, shape S; ``other`` is of the same class."""

    def detach(self) -> "Distribution":
        """Returns the same distribution without gradient."""

    def rows(self, rows: Tensor) -> "Distribution":
        """Returns the distribution of some batch elements, chosen by a mask of shape S."""

    def masked(self, mask: Tensor) -> "Distribution":
        """Returns the distribution given that the mask, [*S, size], allows the action."""

    def parameters(self) -> Tensor:
        """Returns what :func:`distribution_from` makes it of again, [*S, P], without gradient."""


def as_distribution(policy: Distribution | torch.distributions.Distribution) -> Distribution:
    """Returns a network's policy as a :class:`Distribution`; wraps a ``torch.distributions`` object."""
    if not isinstance(policy, torch.distributions.Distribution):
        return policy
    from rl_modules.distributions.torch_distribution import TorchDistribution

    wrapped: Any = TorchDistribution(policy)  # without rows, masks and parameters
    return wrapped


def parameter_count(space: spaces.Space) -> int:
    """How many numbers per state a policy must output for this action space."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return int(space.shape[0])
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    raise UsageError(
        f"the action space {space} has no action distribution; it must be Discrete, a Box, a vector MultiDiscrete or a "
        "vector MultiBinary"
    )


def matrix_shape(space: spaces.Space) -> tuple[int, ...] | None:
    """Returns the shape of a Box's actions; None if they are vectors."""
    return None if space.shape is None or len(space.shape) == 1 else space.shape


def make_distribution(
    space: spaces.Space, parameters: Tensor, log_std: Tensor | None = None, latent: Tensor | None = None
) -> Distribution:
    """Returns the distribution with a policy's outputs as parameters; ``latent``: features of state-dependent noise."""
    if isinstance(space, spaces.Box):
        if log_std is None:
            raise UsageError(f"the action space {space} needs log_std, the log standard deviation")
        if latent is not None and log_std.ndim == 2:
            from rl_modules.distributions.state_dependent import StateDependentGaussian

            # As in Stable-Baselines3, the noise does not train the features.
            latent = (latent if latent.dtype is torch.float64 else latent.float()).detach()
            return StateDependentGaussian(parameters, log_std, latent, matrix_shape(space))
        from rl_modules.distributions.independent import DiagGaussian

        return DiagGaussian(parameters, log_std, matrix_shape(space))
    if isinstance(space, spaces.MultiDiscrete):
        from rl_modules.distributions.independent import MultiCategorical

        return MultiCategorical(parameters, space.nvec.tolist())
    if isinstance(space, spaces.MultiBinary):
        from rl_modules.distributions.independent import Bernoulli

        return Bernoulli(parameters)
    return Categorical(parameters)


def distribution_from(space: spaces.Space, parameters: Tensor) -> Distribution:
    """Returns the distribution over ``space`` whose :meth:`Distribution.parameters` these are, [*S, P]."""
    if isinstance(space, spaces.Box):
        mean, log_std = parameters.chunk(2, dim=-1)
        return make_distribution(space, mean, log_std)
    return make_distribution(space, parameters)


def sample_allowed(space: spaces.Space, mask: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Actions drawn uniformly from what the mask allows, [*S, *act], from a mask [*S, size]."""
    logits = torch.zeros(*mask.shape[:-1], parameter_count(space), dtype=torch.float32, device=mask.device)
    return make_distribution(space, logits).masked(mask).sample(generator)
