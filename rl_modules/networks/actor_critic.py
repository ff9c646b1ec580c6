"""The network of the on-policy algorithms: a policy and a value function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.distributions import Distribution, make_distribution, parameter_count
from rl_modules.fast.modules import call
from rl_modules.functional.checks import as_float
from rl_modules.networks.encoders import build_encoder, encoding_width, init_orthogonal
from rl_modules.networks.layers import (
    ParallelMLP,
    last_layer,
    mlp,
    orthogonal,
    tower_widths,
)


class ActorCritic(nn.Module):
    """A policy and a value function on one encoder, in separate towers."""

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        net_arch: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        activation_fn: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        critic: bool = True,
        use_sde: bool = False,
    ) -> None:
        super().__init__()
        self.action_space = action_space
        self.encoder = build_encoder(observation_space)
        width = encoding_width(self.encoder)
        pi, vf = tower_widths(observation_space, net_arch, ("pi", "vf"))
        self.critic = critic
        self.parallel = critic and list(pi) == list(vf) and len(pi) > 0
        self.towers: nn.Module
        if self.parallel:
            self.towers = ParallelMLP(2, [width, *pi], activation_fn)
        else:
            self.towers = nn.ModuleList(mlp([width, *arch], activation_fn) for arch in ([pi, vf] if critic else [pi]))
        self.policy_head = nn.Linear([width, *pi][-1], parameter_count(action_space))
        self.value_head = nn.Linear([width, *vf][-1], 1) if critic else None
        self.log_std: nn.Parameter | None = None
        if isinstance(action_space, spaces.Box):
            shape = ([width, *pi][-1],) * use_sde + (parameter_count(action_space),)
            self.log_std = nn.Parameter(torch.full(shape, float(log_std_init), dtype=torch.float32, device="cpu"))
        if ortho_init:
            init_orthogonal(self.encoder)
            orthogonal(self.towers)
            orthogonal(self.policy_head, gain=0.01)
            if self.value_head is not None:
                orthogonal(self.value_head, gain=1.0)

    def forward(self, observation: Any) -> tuple[Distribution, Tensor]:
        """Policy and value of a batch of observations."""
        features = call(self.encoder, observation).to(self.policy_head.weight.dtype)
        if self.parallel:
            latents = call(self.towers, features)
        else:
            latents = [call(tower, features) for tower in self.towers]  # type: ignore[attr-defined]
        numbers = as_float(call(self.policy_head, latents[0]))
        policy = make_distribution(self.action_space, numbers, self.log_std, latents[0])
        if self.value_head is None:
            return policy, features.new_zeros(features.shape[0], dtype=torch.float32)
        return policy, last_layer(self.value_head, latents[1]).squeeze(-1)
