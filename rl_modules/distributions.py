"""Action distributions with private random generators.

`torch.distributions` has no ``generator`` argument, and its checks cost more than the arithmetic of a small policy.
These are the same densities (the tests compare them), with the few methods that policy gradients need. ``S`` below
is the batch shape; every distribution is over one action per batch element, so ``log_prob``, ``entropy`` and ``kl``
have shape S, summed over the action's components.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as nnf

from rl_modules.common.errors import UsageError
from rl_modules.common.masks import FORBIDDEN, mask_logits

LOG_2PI = math.log(2 * math.pi)


class Distribution(Protocol):
    """What the algorithms ask of a policy's action distribution."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per batch element, without gradient."""

    def mode(self) -> Tensor:
        """The most likely action, shape as :meth:`sample`."""

    def log_prob(self, action: Tensor) -> Tensor:
        """Log π(a|s) in nats, shape S."""

    def entropy(self) -> Tensor:
        """Entropy in nats, shape S (differential for continuous actions)."""

    def kl(self, other: Any) -> Tensor:
        """KL(self || other) in nats, shape S; ``other`` is of the same class."""

    def detach(self) -> "Distribution":
        """The same distribution without gradient."""

    def rows(self, rows: Tensor) -> "Distribution":
        """The distribution of some batch elements, chosen by a mask of shape S."""

    def masked(self, mask: Tensor) -> "Distribution":
        """The same distribution, given that only what the mask allows can happen; layout as in
        :func:`rl_modules.common.masks.mask_size`, [*S, size].
        """

    def parameters(self) -> Tensor:
        """What :func:`distribution_from` makes it from again, shape [*S, P], without gradient."""


class Categorical:
    """One of A actions.

    Args:
        logits: unnormalised log-probabilities, shape [*S, A].
    """

    def __init__(self, logits: Tensor) -> None:
        self.log_p = torch.log_softmax(logits, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        # Gumbel-max in its exponential form: argmax p / E with E ~ Exp(1) is distributed as p.
        noise = torch.empty_like(self.log_p).exponential_(generator=generator)
        return (self.log_p.detach() - noise.log()).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_p.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_p.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def kl(self, other: Any) -> Tensor:
        return (self.log_p.exp() * (self.log_p - other.log_p)).sum(-1)

    def detach(self) -> "Categorical":
        # log_softmax of log-probabilities is the identity.
        return Categorical(self.log_p.detach())

    def rows(self, rows: Tensor) -> "Categorical":
        return type(self)(self.log_p[rows])

    def masked(self, mask: Tensor) -> "Categorical":
        return MaskedCategorical(mask_logits(self.log_p, mask))

    def parameters(self) -> Tensor:
        return self.log_p.detach()


class MaskedCategorical(Categorical):
    """A :class:`Categorical` of which some options have probability 0."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty_like(self.log_p).exponential_(generator=generator)
        # The generator may return 0, whose logarithm would outweigh any number.
        return (self.log_p.detach() - noise.clamp_min(1e-30).log()).argmax(-1)


class MultiCategorical:
    """K independent choices, the k-th among ``nvec[k]``.

    Args:
        logits: the choices' logits side by side, shape [*S, sum(nvec)].
        nvec: number of options of each choice.
    """

    parts: Sequence[Categorical]

    def __init__(self, logits: Tensor, nvec: list[int]) -> None:
        self.nvec = nvec
        self.parts = [Categorical(part) for part in logits.split(nvec, dim=-1)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return torch.stack([part.sample(generator) for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        each = [part.log_prob(choice) for part, choice in zip(self.parts, action.unbind(-1), strict=True)]
        return torch.stack(each).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Any) -> Tensor:
        return torch.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]).sum(0)

    def detach(self) -> "MultiCategorical":
        return MultiCategorical(self.parameters(), self.nvec)

    def rows(self, rows: Tensor) -> "MultiCategorical":
        chosen = copy.copy(self)
        chosen.parts = [part.rows(rows) for part in self.parts]
        return chosen

    def masked(self, mask: Tensor) -> "MultiCategorical":
        masked = copy.copy(self)
        masked.parts = [p.masked(m) for p, m in zip(self.parts, mask.split(self.nvec, dim=-1), strict=True)]
        return masked

    def parameters(self) -> Tensor:
        return torch.cat([part.log_p.detach() for part in self.parts], dim=-1)


class Bernoulli:
    """K independent switches, for MultiBinary actions.

    Args:
        logits: log-odds of each switch being 1, shape [*S, K].
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.empty_like(self.logits).uniform_(generator=generator)
        return (uniform < self.logits.detach().sigmoid()).long()

    def mode(self) -> Tensor:
        return (self.logits > 0).long()

    def log_prob(self, action: Tensor) -> Tensor:
        # log σ(z) for ones, log σ(-z) for zeros.
        return nnf.logsigmoid(torch.where(action.bool(), self.logits, -self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        z = self.logits
        return -(z.sigmoid() * nnf.logsigmoid(z) + (-z).sigmoid() * nnf.logsigmoid(-z)).sum(-1)

    def kl(self, other: Any) -> Tensor:
        z, w = self.logits, other.logits
        ones = z.sigmoid() * (nnf.logsigmoid(z) - nnf.logsigmoid(w))
        zeros = (-z).sigmoid() * (nnf.logsigmoid(-z) - nnf.logsigmoid(-w))
        return (ones + zeros).sum(-1)

    def detach(self) -> "Bernoulli":
        return Bernoulli(self.logits.detach())

    def rows(self, rows: Tensor) -> "Bernoulli":
        return Bernoulli(self.logits[rows])

    def masked(self, mask: Tensor) -> "Bernoulli":
        allowed = mask.bool().unflatten(-1, (-1, 2))
        off, on = allowed.unbind(-1)
        logits = torch.where(off & ~on, FORBIDDEN, self.logits)
        return Bernoulli(torch.where(on & ~off, -FORBIDDEN, logits))

    def parameters(self) -> Tensor:
        return self.logits.detach()


class DiagGaussian:
    """Independent normals, for Box actions; densities of the unclipped action.

    Args:
        mean: shape [*S, D], in the action's units.
        log_std: log of the standard deviation, shape [D] where it is the same in every state, else [*S, D].
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_std = log_std

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.mean.detach() + self.log_std.detach().exp() * noise

    def mode(self) -> Tensor:
        return self.mean.detach()

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * torch.exp(-self.log_std)
        return -0.5 * (z * z).sum(-1) - self.log_std.sum(-1) - 0.5 * LOG_2PI * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        per_state = self.log_std.sum(-1) + 0.5 * (1 + LOG_2PI) * self.mean.shape[-1]
        return per_state.expand(self.mean.shape[:-1])

    def kl(self, other: Any) -> Tensor:
        variance_ratio = torch.exp(2 * (self.log_std - other.log_std))
        distance = ((self.mean - other.mean) * torch.exp(-other.log_std)) ** 2
        return 0.5 * (variance_ratio + distance - 1).sum(-1) + (other.log_std - self.log_std).sum(-1)

    def detach(self) -> "DiagGaussian":
        return DiagGaussian(self.mean.detach(), self.log_std.detach())

    def rows(self, rows: Tensor) -> "DiagGaussian":
        return DiagGaussian(self.mean[rows], self.log_std.expand_as(self.mean)[rows])

    def masked(self, mask: Tensor) -> "DiagGaussian":
        raise UsageError("action_mask: a Box has no single actions that a mask could forbid; leave it out")

    def parameters(self) -> Tensor:
        return torch.cat([self.mean, self.log_std.expand_as(self.mean)], dim=-1).detach()


class TorchDistribution:
    """A ``torch.distributions`` object with private randomness, for networks that return one.

    Args:
        distribution: over one action per batch element: components joined by ``torch.distributions.Independent``.
    """

    def __init__(self, distribution: torch.distributions.Distribution) -> None:
        self.distribution = distribution

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        device = None if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        # These objects draw from the global generators, which stay as they were.
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.distribution.sample()

    def mode(self) -> Tensor:
        return self.distribution.mode.detach()

    def log_prob(self, action: Tensor) -> Tensor:
        log_prob = self.distribution.log_prob(action)
        if log_prob.shape != self.distribution.batch_shape or log_prob.dim() != 1:
            raise UsageError(f"the policy's {type(self.distribution).__name__} has log_prob of shape "
                             f"{tuple(log_prob.shape)}, expected one number per action; join its components by "
                             "torch.distributions.Independent(…, 1)")  # fmt: skip
        return log_prob

    def entropy(self) -> Tensor:
        return self.distribution.entropy()

    def kl(self, other: Any) -> Tensor:
        return torch.distributions.kl_divergence(self.distribution, other.distribution)

    def detach(self) -> "TorchDistribution":
        raise UsageError(f"TRPO needs a detached copy of the policy, which {type(self.distribution).__name__} does not "
                         "have; return one of rl_modules.distributions")  # fmt: skip

    def rows(self, rows: Tensor) -> "TorchDistribution":
        raise UsageError(f"{type(self.distribution).__name__} has no rows to choose from; return one of "
                         "rl_modules.distributions")  # fmt: skip

    def masked(self, mask: Tensor) -> "TorchDistribution":
        raise UsageError(f"action_mask: {type(self.distribution).__name__} can't be masked; return one of "
                         "rl_modules.distributions")  # fmt: skip

    def parameters(self) -> Tensor:
        raise UsageError(f"the KL penalty keeps the policy's parameters, which {type(self.distribution).__name__} does "
                         "not give as one tensor; return one of rl_modules.distributions")  # fmt: skip


def as_distribution(policy: Any) -> Distribution:
    """What a network returned as policy: a :class:`Distribution`, or a wrapped ``torch.distributions`` object."""
    return TorchDistribution(policy) if isinstance(policy, torch.distributions.Distribution) else policy


def parameter_count(space: spaces.Space) -> int:
    """How many numbers per state a policy must output for this action space.

    Raises:
        UsageError: the space has no distribution here.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return int(space.shape[0])
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return int(space.shape[0])
    raise UsageError(
        f"the action space {space} has no action distribution; it must be Discrete, a vector Box, a vector "
        "MultiDiscrete or a vector MultiBinary"
    )


def make_distribution(space: spaces.Space, parameters: Tensor, log_std: Tensor | None = None) -> Distribution:
    """The distribution over ``space`` with a policy's outputs as its parameters.

    Args:
        space: the action space.
        parameters: shape [*S, parameter_count(space)]; means for Box, logits otherwise.
        log_std: shape [D], needed for Box only.
    """
    if isinstance(space, spaces.Box):
        if log_std is None:
            raise UsageError(f"the action space {space} needs log_std, the log standard deviation")
        return DiagGaussian(parameters, log_std)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(parameters, space.nvec.tolist())
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(parameters)
    return Categorical(parameters)


def distribution_from(space: spaces.Space, parameters: Tensor) -> Distribution:
    """The distribution over ``space`` whose :meth:`Distribution.parameters` these are, [*S, P]."""
    if isinstance(space, spaces.Box):
        mean, log_std = parameters.chunk(2, dim=-1)
        return DiagGaussian(mean, log_std)
    return make_distribution(space, parameters)


def sample_allowed(space: spaces.Space, mask: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Actions drawn uniformly from what the mask allows, [*S, *act], from a mask [*S, size]."""
    logits = torch.zeros(*mask.shape[:-1], parameter_count(space), dtype=torch.float32, device=mask.device)
    return make_distribution(space, logits).masked(mask).sample(generator)
