"""Value functions alone, ensembles of critics, and policies over a bounded Box."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as nnf

from rl_modules import functional as F
from rl_modules.distributions.state_dependent import EPSILON, NoiseMatrices
from rl_modules.functional.checks import as_float
from rl_modules.networks.encoders import build_encoder, encoding_width, init_orthogonal
from rl_modules.networks.layers import ParallelLinear, activation, hidden_widths, last_layer, mlp, orthogonal
from rl_modules.networks.q_network import apply_tower

#: Bounds of the log standard deviation of a squashed Gaussian, as in the original SAC code.
LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0


class ActionBounds(nn.Module):
    """Converts between the actions of a bounded Box, [N, *shape], and vectors in [-1, 1], [N, A]."""

    center: Tensor
    half_range: Tensor

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.shape = space.shape
        low, high = (torch.as_tensor(bound, dtype=torch.float64).reshape(-1) for bound in (space.low, space.high))
        self.width = len(low)
        self.is_unit = bool((low == -1).all() and (high == 1).all())
        # The space is part of the hyperparameters, so the state dict need not repeat it.
        self.register_buffer("center", ((high + low) / 2).float(), persistent=False)
        self.register_buffer("half_range", ((high - low) / 2).float(), persistent=False)

    def to_box(self, squashed: Tensor) -> Tensor:
        """Converts vectors in [-1, 1] to actions of the Box, [N, *shape] float32."""
        action = squashed.float()
        if not self.is_unit:
            action = self.center.float() + self.half_range.float() * action
        return action.reshape(-1, *self.shape)

    def from_box(self, action: Tensor) -> Tensor:
        """Converts actions of the Box to vectors in [-1, 1], [N, A] float32."""
        flat = action.reshape(len(action), self.width).float()
        if self.is_unit:
            return flat
        return torch.where(self.half_range > 0, (flat - self.center) / self.half_range, 0.0).float()


class ValueNetwork(nn.Module):
    """V(s) on an encoder of its own, [B, *obs] → [B]."""

    def __init__(
        self,
        observation_space: spaces.Space,
        net_arch: Sequence[int] | None = None,
        activation_fn: str = "tanh",
        ortho_init: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = build_encoder(observation_space)
        sizes = [encoding_width(self.encoder), *hidden_widths(observation_space, net_arch)]
        self.tower = mlp(sizes, activation_fn)
        self.head = nn.Linear(sizes[-1], 1)
        if ortho_init:
            init_orthogonal(self.encoder)
            orthogonal(self.tower)
            orthogonal(self.head, gain=1.0)

    def forward(self, observation: Any) -> Tensor:
        features = self.encoder(observation).to(self.head.weight.dtype)
        return last_layer(self.head, self.tower(features)).squeeze(-1)


class ParallelLayerNorm(nn.Module):
    """Layer normalisation with K sets of scales and shifts; a shape of fewer than K uses the first ones.

    Shape: [K, B, width] → the same.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, k: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(k, 1, width)), nn.Parameter(torch.zeros(k, 1, width))

    def extra_repr(self) -> str:
        return f"{len(self.weight)} of {self.weight.shape[2]}"

    def forward(self, x: Tensor) -> Tensor:
        k, _, width = x.shape
        return torch.addcmul(self.bias[:k], nnf.layer_norm(x, (width,)), self.weight[:k])


class Tower(nn.Module):
    """An encoder, hidden layers, and a head of ``n_outputs`` numbers."""

    def __init__(
        self, observation_space: spaces.Space, n_outputs: int, net_arch: Sequence[int], activation_fn: str = "relu"
    ) -> None:
        super().__init__()
        self.encoder = build_encoder(observation_space)
        sizes = [encoding_width(self.encoder), *net_arch]
        self.trunk = mlp(sizes, activation_fn)
        self.head = nn.Linear(sizes[-1], n_outputs)


class SquashedGaussianPolicy(Tower):
    """A diagonal Gaussian over A numbers, squashed by tanh into [-1, 1].

    Shape: [B, *obs] → mean and log standard deviation before tanh, [B, A] float32 each.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, appendix C.
    """

    def __init__(
        self, observation_space: spaces.Space, width: int, net_arch: Sequence[int], activation_fn: str = "relu"
    ) -> None:
        # Both heads in one layer: torch initialises it like two.
        super().__init__(observation_space, 2 * width, net_arch, activation_fn)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        mean, log_std = apply_tower(self.trunk, self.head, self.encoder(observation)).chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, observation: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions in (-1, 1), [B, A], and log π, [B], from standard normal numbers, with gradients."""
        mean, log_std = self(observation)
        pre_tanh = torch.addcmul(mean, log_std.exp(), noise)
        return pre_tanh.tanh(), F.squashed_gaussian_log_prob(mean, log_std, pre_tanh)


class DeterministicPolicy(Tower):
    """One action in [-1, 1]^A per observation, [B, *obs] → [B, A] float32 (Lillicrap et al. 2016, arXiv:1509.02971)."""

    def forward(self, observation: Any) -> Tensor:
        return apply_tower(self.trunk, self.head, self.encoder(observation)).tanh()


class Critics(nn.Module):
    """K action-value networks of one size on one encoder, computed as one batched network.

    Every layer holds the weights of all K networks and multiplies them in one kernel. Each is initialised like
    :class:`torch.nn.Linear`, and no weight is shared.

    Shape: observations [B, *obs] and actions in [-1, 1] [B, A] → [K, B, n_outputs] float32.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        width: int,
        n_critics: int,
        net_arch: Sequence[int],
        activation_fn: str = "relu",
        n_outputs: int = 1,
        layer_norm: bool = False,
        dropout_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_critics = n_critics
        self.encoder = build_encoder(observation_space)
        sizes = [encoding_width(self.encoder) + width, *net_arch, n_outputs]
        pairs = zip(sizes[:-1], sizes[1:], strict=True)
        self.layers: Any = nn.ModuleList(ParallelLinear(n_critics, narrow, wide) for narrow, wide in pairs)
        #: Before the activation of each hidden layer, as DroQ has it: dropout, then the normalisation.
        self.dropout = nn.Dropout(dropout_rate) if dropout_rate else None
        self.norms = nn.ModuleList(ParallelLayerNorm(n_critics, w) for w in net_arch) if layer_norm else None
        # In place, because no derivative reads the output of the layer before.
        self.activation = nn.ReLU(inplace=True) if activation_fn == "relu" else activation(activation_fn)

    def forward(self, observation: Any, action: Tensor, only_first: bool = False, frozen: bool = False) -> Tensor:
        """Action values; ``only_first``: the first critic's alone; ``frozen``: gradients flow to the actions only."""
        features = self.encoder(observation)
        x = torch.cat([features, action.to(features.dtype)], dim=1).to(self.layers[0].weight.dtype)
        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
        if only_first and self.n_critics > 1:
            weights, biases = [w[:1] for w in weights], [b[:1] for b in biases]
        if frozen:
            weights, biases = [w.detach() for w in weights], [b.detach() for b in biases]
        x = x.expand(len(weights[0]), -1, -1)
        for i, (weight, bias) in enumerate(zip(weights[:-1], biases[:-1], strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = x if self.dropout is None else self.dropout(x)
            x = self.activation(x if self.norms is None else self.norms[i](x))
        # As in `last_layer`; entering the context takes longer than this check.
        device = x.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            return as_float(torch.baddbmm(biases[-1], x.to(weights[-1].dtype), weights[-1]))


class PolicyAndCritics(nn.Module):
    """The network of an off-policy algorithm: a policy, its critics, and the bounds of real actions."""

    policy: Any
    critics: Critics
    bounds: Any

    def __init__(self, policy: nn.Module, critics: Critics, bounds: ActionBounds | None) -> None:
        super().__init__()
        self.policy = policy
        self.critics = critics
        self.bounds = bounds


#: Bound of the mean before tanh, as in Stable-Baselines3.
CLIP_MEAN = 2.0


class StateDependentPolicy(SquashedGaussianPolicy):
    """A Gaussian with mean μ(s) and variance z² σ², squashed by tanh; z are its last features, [B, H], σ is [H, A].

    An update draws separate noise for each row, from the same distribution; Stable-Baselines3 draws one matrix for the
    minibatch.

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
        Tower.__init__(self, observation_space, width, net_arch, activation_fn)
        start = torch.full((self.head.in_features, width), float(log_std_init), dtype=torch.float32, device="cpu")
        self.log_std = nn.Parameter(start)

    def _mean_and_features(self, observation: Any) -> tuple[Tensor, Tensor]:
        features = self.trunk(self.encoder(observation).to(self.head.weight.dtype))
        mean = as_float(self.head(features)).clamp(-CLIP_MEAN, CLIP_MEAN)
        return mean, as_float(features)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        mean, features = self._mean_and_features(observation)
        variance = features.square() @ (2 * self.log_std).exp()
        return mean, 0.5 * torch.log(variance + EPSILON)

    def explore(
        self, observation: Any, matrices: NoiseMatrices, generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Returns actions in (-1, 1), [N, A], with a rollout's noise; None if this is no step of one."""
        mean, features = self._mean_and_features(observation)
        noise = matrices.next(len(mean), self.log_std.exp(), generator)
        return None if noise is None else (mean + torch.bmm(features[:, None], noise)[:, 0]).tanh()
