"""Parallelised Q-network: Q-learning without replay and without a target network."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_modules import functional as F
from rl_modules.base import ControlModule, beside_network
from rl_modules.common.masks import mask_logits, split_mask
from rl_modules.common.spaces import is_image
from rl_modules.contract import Experience, Minibatch, Rollout
from rl_modules.core.settings import setting
from rl_modules.core.state import persistent
from rl_modules.exploration import epsilon_greedy, exploration_rate, require_finite_actions
from rl_modules.networks.custom import custom_q_network
from rl_modules.networks.encoders import build_encoder, encoding_width
from rl_modules.networks.layers import activation, check_widths, hidden_widths, last_layer


class NormalizedQNetwork(nn.Module):
    """Q(s, ·) with a LayerNorm after every hidden layer, [B, *obs] → [B, n_actions] float32."""

    def __init__(
        self, observation_space: spaces.Space, n_actions: int, net_arch: Sequence[int] | None, activation_fn: str
    ) -> None:
        super().__init__()
        if net_arch is None:
            net_arch = [512] if is_image(observation_space) else [120, 84]
        self.encoder = build_encoder(observation_space)
        sizes = [encoding_width(self.encoder), *hidden_widths(observation_space, net_arch)]
        layers: list[nn.Module] = []
        for width_in, width_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(width_in, width_out), nn.LayerNorm(width_out), activation(activation_fn)]
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], n_actions)

    def forward(self, observation: Any) -> Tensor:
        features = self.encoder(observation).to(self.head.weight.dtype)
        return last_layer(self.head, self.trunk(features))


class PQN(ControlModule):
    """Q-learning on the rollouts of parallel environments, without replay and target network.

    Gallici et al. 2024, arXiv:2407.04811. An ε-greedy policy collects a rollout; then, over several passes,

        L = ½ E[(Q(s_t, a_t) - G_t)²],   G_t = r_t + γ [λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a)]

    with Q as it was during the rollout on the right, and G_t = r_t in a terminal state. At a time limit and at the
    rollout's end max_a Q of the true successor takes the place of the bracket. Layer normalisation keeps the values
    from diverging. The names and defaults are CleanRL's.
    """

    supported_action_spaces = (spaces.Discrete,)
    experience = Experience("rollouts", n_steps=128, batch_size=128, n_epochs=4)

    gamma: float = setting(default=0.99, says="discount γ per transition", least=0, most=1)
    q_lambda: float = setting(default=0.65, says="λ: 0 for one-step targets, 1 for returns", least=0, most=1)
    exploration_fraction: float = setting(
        default=0.5, says="share of ``total_timesteps`` over which ε decays", above=0, most=1
    )
    exploration_initial_eps: float = setting(
        default=1.0, says="initial ε, the probability of a random action", least=0, most=1
    )
    exploration_final_eps: float = setting(default=0.05, says="final ε", least=0, most=1)
    max_grad_norm: float | None = setting(
        default=10.0,
        says="global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None: no "
        "clipping",
        above=0,
    )
    net_arch: list[int] | None = setting(
        default=None,
        says="hidden widths; None: [120, 84], and [512] after a convolutional encoder",
        check=check_widths,
        idle=beside_network,
    )
    activation_fn: str = setting(default="relu", says="tanh, relu, elu, silu, gelu or leaky_relu", idle=beside_network)

    #: ε, the probability of a random action.
    exploration_rate: float = persistent(lambda m: m.exploration_initial_eps)

    def check_spaces(self) -> None:
        """Refuses an action space without a finite number of actions."""
        require_finite_actions(type(self).__name__, self.action_space)

    def build_network(self) -> None:
        n_actions = int(self.action_space.n)
        if self.own_network is not None:
            custom: Any = custom_q_network(self.own_network, self.observation_space, n_actions)
            self.network = custom
        else:
            self.network = NormalizedQNetwork(self.observation_space, n_actions, self.net_arch, self.activation_fn)

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns ε-greedy actions, and max_a Q(s, a) as the states' values, each [N]."""
        value, greedy = self.q_values(observation).max(1)
        if deterministic:
            return {"action": greedy, "value": value}
        mask = split_mask(observation)[1]
        action = epsilon_greedy(greedy, self.exploration_rate, self.action_space, mask, generator)
        return {"action": action, "value": value}

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Computes the targets of a rollout, see :class:`~rl_modules.contract.Rollout`."""
        return {"observation": rollout["observation"], "action": rollout["action"], "returns": self.td_target(rollout)}

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        q = self.q_values(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        loss = self.td_loss(q, batch["returns"])
        if self.run.logs_this_epoch:
            self.record(loss=loss, q_mean=q.mean())
        return self.loss_over_ranks(loss, len(q))

    # ---------------------------------------------------------------- pieces to override

    def q_values(self, observation: Any) -> Tensor:
        """Returns Q(s, ·), [B, A]; masked actions have the value -1e8."""
        observation, mask = split_mask(observation)
        q = self.network(observation)
        return q if mask is None else mask_logits(q, mask)

    def td_target(self, rollout: Rollout) -> Tensor:
        """Returns G of every transition, [T, N]: the advantage estimator's λ-return with max_a Q as the value."""
        value = rollout["value"]
        return value + F.gae(
            rollout["reward"],
            value,
            rollout["next_value"],
            rollout["terminated"],
            rollout["truncated"],
            self.gamma,
            self.q_lambda,
        )

    def td_loss(self, q: Tensor, target: Tensor) -> Tensor:
        """Returns half the mean squared error of Q(s, a), a scalar."""
        return F.value_loss(q, target)

    # ---------------------------------------------------------------- schedules, optimizer and checkpoints

    def update_schedules(self, progress_remaining: float) -> None:
        super().update_schedules(progress_remaining)
        self.exploration_rate = exploration_rate(
            progress_remaining, self.exploration_fraction, self.exploration_initial_eps, self.exploration_final_eps
        )
        self.record_now(**{"rollout/exploration_rate": self.exploration_rate})

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns RAdam at 2.5e-4, as the paper and CleanRL take."""
        return torch.optim.RAdam(parameters, lr=2.5e-4, foreach=True)
