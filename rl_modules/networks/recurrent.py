"""The recurrent actor-critic."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.distributions import Distribution, make_distribution, parameter_count
from rl_modules.functional.checks import as_float
from rl_modules.networks.encoders import build_encoder, init_orthogonal
from rl_modules.networks.layers import last_layer, mlp, orthogonal, tower_widths

CELLS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}


@cache
def lstm_runs_in(dtype: torch.dtype) -> bool:
    """Tries torch's LSTM on the CPU under autocast to a type: oneDNN has one of bfloat16 for AVX-512 only."""
    with torch.no_grad(), torch.autocast("cpu", dtype):
        try:
            nn.LSTM(1, 1, device="meta").to_empty(device="cpu")(torch.zeros(1, 1, 1))
        except RuntimeError:
            return False
    return True


class RecurrentActorCritic(nn.Module):
    """A policy and a value function on one encoder and one or two recurrent networks.

    The state of a memory is one tensor [B, K, H]: the layers' hidden states, an LSTM's cells, then the critic's.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        rnn: str = "lstm",
        hidden_size: int = 256,
        n_layers: int = 1,
        shared: bool = False,
        critic_rnn: bool = True,
        net_arch: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        activation_fn: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        use_sde: bool = False,
    ) -> None:
        super().__init__()
        self.action_space = action_space
        self.shared = shared
        self.encoder = build_encoder(observation_space)
        width = int(cast(Any, self.encoder).out_features)
        self.actor = CELLS[rnn](width, hidden_size, n_layers)
        self.critic = CELLS[rnn](width, hidden_size, n_layers) if critic_rnn else None
        self.critic_features = None if shared or critic_rnn else nn.Linear(width, hidden_size)
        # Rows of one memory's state: its layers, twice for an LSTM.
        self.rows = n_layers * (2 if rnn == "lstm" else 1)
        self.state_shape = (self.rows * (2 if critic_rnn else 1), hidden_size)
        pi, vf = tower_widths(observation_space, net_arch, ("pi", "vf"))
        self.policy_tower = mlp([hidden_size, *pi], activation_fn)
        self.value_tower = mlp([hidden_size, *vf], activation_fn)
        self.policy_head = nn.Linear([hidden_size, *pi][-1], parameter_count(action_space))
        self.value_head = nn.Linear([hidden_size, *vf][-1], 1)
        self.log_std: nn.Parameter | None = None
        if isinstance(action_space, spaces.Box):
            shape = ([hidden_size, *pi][-1],) * use_sde + (parameter_count(action_space),)
            self.log_std = nn.Parameter(torch.full(shape, float(log_std_init)))
        if ortho_init:
            init_orthogonal(self.encoder)
            for part in (self.policy_tower, self.value_tower):
                orthogonal(part)
            orthogonal(self.policy_head, gain=0.01)
            orthogonal(self.value_head, gain=1.0)

    def initial_state(self, n: int) -> Tensor:
        """Returns the state at the start of an episode, [n, K, H]: zeros."""
        weight = self.policy_head.weight
        return torch.zeros(n, *self.state_shape, dtype=weight.dtype, device=weight.device)

    def forward(
        self, observation: Any, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Distribution, Tensor, Tensor]:
        """Policy and value along sequences."""
        batch, length = tree_leaves(observation)[0].shape[:2]
        features = self.encoder(tree_map(lambda x: x.flatten(0, 1), observation))
        features = features.to(self.policy_head.weight.dtype).unflatten(0, (batch, length))
        memory, after = self.unroll(features.transpose(0, 1), state, starts)
        policy_latent, value_latent = (x.transpose(0, 1).flatten(0, 1) for x in memory)
        latent = self.policy_tower(policy_latent)
        parameters = as_float(self.policy_head(latent))
        value = last_layer(self.value_head, self.value_tower(value_latent)).squeeze(-1)
        return make_distribution(self.action_space, parameters, self.log_std, latent), value, after

    def unroll(self, features: Tensor, state: Tensor, starts: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Returns the outputs of both recurrent networks, [L, B, H] each, and the last state."""
        cuts = [0, len(features)]
        if starts is not None:
            # The fused kernel runs all sequences at once up to the next step at which any episode begins.
            cuts = [0, *(t for t in starts.any(0).nonzero().flatten().tolist() if t), len(features)]
        parts: list[list[Tensor]] = [[], []]
        for begin, end in pairwise(cuts):
            if starts is not None:
                state = state * ~starts[:, begin, None, None]
            piece = features[begin:end]
            read, actor_state = self._run(self.actor, piece, state[:, : self.rows])
            parts[0].append(read)
            if self.critic is None:
                state = actor_state
            else:
                read, critic_state = self._run(self.critic, piece, state[:, self.rows :])
                parts[1].append(read)
                state = torch.cat([actor_state, critic_state], 1)
        actor = torch.cat(parts[0]) if len(parts[0]) > 1 else parts[0][0]
        if self.critic is not None:
            critic = torch.cat(parts[1]) if len(parts[1]) > 1 else parts[1][0]
        else:
            critic = actor.detach() if self.critic_features is None else self.critic_features(features)
        return [actor, critic], state

    @staticmethod
    def _run(rnn: nn.Module, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layers = state.transpose(0, 1).contiguous()
        if isinstance(rnn, nn.GRU):
            read, after = rnn(features, layers)
        else:
            hidden, cell = layers.chunk(2)
            on_cpu = features.is_cpu and torch.is_autocast_enabled("cpu")
            lacks_kernel = on_cpu and not lstm_runs_in(torch.get_autocast_dtype("cpu"))
            with torch.autocast("cpu", enabled=False) if lacks_kernel else nullcontext():
                read, (hidden, cell) = rnn(features, (hidden.contiguous(), cell.contiguous()))
            after = torch.cat([hidden, cell])
        return read, after.transpose(0, 1).to(state.dtype)
