"""Generalized state-dependent exploration (gSDE): the noise matrices of a rollout, and the actions that they make."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.distributions.independent import DiagGaussian

if TYPE_CHECKING:
    from rl_modules.base import ControlModule


#: Added to the variance, as in Stable-Baselines3.
EPSILON = 1e-6


class NoiseMatrices:
    """The matrices that turn features into noise in one rollout, one per environment."""

    def __init__(self, sample_freq: int) -> None:
        self.sample_freq = sample_freq
        self.steps = 0
        self.standard: Tensor | None = None

    def next(self, n: int, std: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """Returns the matrices of the next step, [n, H, A]; None if it is none of the rollout's."""
        is_due = self.standard is None or (self.sample_freq > 0 and self.steps % self.sample_freq == 0)
        if self.standard is not None and len(self.standard) != n:
            return None
        if is_due:
            device = std.device if generator is None else generator.device
            self.standard = torch.randn((n, *std.shape), generator=generator, device=device, dtype=torch.float32)
        self.steps += 1
        assert self.standard is not None
        return std * self.standard.to(std.device)


class StateDependentGaussian(DiagGaussian):
    """The action distribution under gSDE: a ~ N(μ(s), z² σ²), where z are features of s, [B, H], and σ is [H, A].

    Within a rollout the noise is zᵀE. The entries of E are N(0, σ²) and are drawn once for several steps; each step's
    action has the distribution above. Elsewhere :meth:`sample` draws from that distribution.

    Source: Raffin et al. 2021, arXiv:2005.05719, section 3; ε of the variance as in Stable-Baselines3.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, features: Tensor, shape: tuple[int, ...] | None = None) -> None:
        std = log_std.exp()
        variance = features.square() @ std.square()
        super().__init__(mean, 0.5 * torch.log(variance + EPSILON), shape)
        self.features, self.std = features.detach(), std.detach()
        #: Matrices of the rollout that is being collected; None: no rollout is being collected.
        self.matrices: NoiseMatrices | None = None

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        matrices = None
        if self.matrices is not None:
            matrices = self.matrices.next(len(self.mean), self.std, generator)
        if matrices is None:
            return super().sample(generator)
        return self._shaped(self.mean.detach() + torch.bmm(self.features[:, None], matrices)[:, 0])


def check_sde(module: "ControlModule") -> None:
    """Refuses state-dependent noise where it can't be used."""
    if not isinstance(module.action_space, spaces.Box):
        raise UsageError(
            f"use_sde=True adds noise to real numbers, for which the action space must be a Box, not "
            f"{module.action_space}; leave it false"
        )
    if module.own_network is not None:
        raise UsageError(
            "use_sde=True needs the features of the project's own networks; give features_extractor "
            "instead of network, or use_sde=False"
        )


def exploring_act(module: "ControlModule") -> Callable[..., Any]:
    """Returns a module's ``act`` with the noise matrices of one rollout."""
    matrices = NoiseMatrices(module.hparams["sde_sample_freq"])

    def act(*args: Any, **arguments: Any) -> Any:
        module.run.noise_matrices = matrices
        try:
            return module.act(*args, **arguments)
        finally:
            module.run.noise_matrices = None

    return act
