"""The policy of SAC, TQC and CrossQ under generalized state-dependent exploration."""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.critics import SquashedGaussianPolicy
from rl_modules.encoders import build_encoder, encoding_width
from rl_modules.layers import full_precision, mlp
from rl_modules.state_dependent_noise import EPSILON, NoiseMatrices

#: Bound of the mean before tanh, as in Stable-Baselines3.
CLIP_MEAN = 2.0


class StateDependentPolicy(SquashedGaussianPolicy):
    """A Gaussian with mean μ(s) and variance z² σ², squashed by tanh; z are its last features, [B, H], σ is [H, A].

    An update draws separate noise for each row, from the same distribution; Stable-Baselines3 draws one matrix for the
    minibatch.

    Args:
        observation_space: space of one observation.
        width: A.
        net_arch: widths of the hidden layers.
        activation_fn: ``relu``, ``tanh``, …
        log_std_init: initial log σ.

    Shape: [B, *obs] → mean and log standard deviation before tanh, [B, A] float32 each.

    Source: Raffin et al. 2021, arXiv:2005.05719.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        width: int,
        net_arch: Sequence[int],
        activation_fn: str = "relu",
        log_std_init: float = -3.0,
    ) -> None:
        nn.Module.__init__(self)
        self.encoder = build_encoder(observation_space)
        sizes = [encoding_width(self.encoder), *net_arch]
        self.trunk = mlp(sizes, activation_fn)
        self.head = nn.Linear(sizes[-1], width)
        start = torch.full((sizes[-1], width), float(log_std_init), dtype=torch.float32, device="cpu")
        self.log_std = nn.Parameter(start)

    def _mean_and_features(self, observation: Any) -> tuple[Tensor, Tensor]:
        features = self.trunk(self.encoder(observation).to(self.head.weight.dtype))
        mean = full_precision(self.head(features)).clamp(-CLIP_MEAN, CLIP_MEAN)
        return mean, full_precision(features)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        mean, features = self._mean_and_features(observation)
        variance = features.square() @ (2 * self.log_std).exp()
        return mean, 0.5 * torch.log(variance + EPSILON)

    def explore(
        self, observation: Any, matrices: NoiseMatrices, generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Returns actions in (-1, 1), [N, A], with a rollout's noise; None if this is not a step of its
        environments.
        """
        mean, features = self._mean_and_features(observation)
        noise = matrices.next(len(mean), self.log_std.exp(), generator)
        return None if noise is None else (mean + torch.bmm(features[:, None], noise)[:, 0]).tanh()
