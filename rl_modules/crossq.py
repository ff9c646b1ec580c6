"""CrossQ: SAC without target networks."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed, setting
from rl_modules.fast.adam import adam
from rl_modules.fast.modules import call
from rl_modules.networks.batch_renorm import BatchRenorm, batch_statistics, renormalized
from rl_modules.networks.critics import Critics
from rl_modules.networks.layers import last_layer
from rl_modules.sac import SAC


class CrossQ(SAC):
    """SAC whose critics are batch-normalised over (s, a) and (s', a') together, and need no target network.

    Bhatt et al. 2024, arXiv:1902.05605. Per minibatch, in this order,

        critics   ½ Σ_k E[(Q_k(s, a) - y)²],   y = r + γ (1 - terminated) (min_k Q_k(s', a') - α log π(a'|s'))
        every policy_delay updates:
        α         -E[log α (log π(ã|s) + target_entropy)],   ã ~ π(·|s)
        policy    E[α log π(ã|s) - min_k Q_k(s, ã)]

    where one forward pass gives Q_k(s, a) and, without gradient, Q_k(s', a'): the batch statistics of
    BatchRenorm are those of both. a' and the policy's loss use running statistics of
    policy and critics; ã is sampled with the batch's. Names and defaults are those of sb3-contrib.
    """

    default_learning_rate = 1e-3
    default_net_arch: ClassVar[dict[str, list[int]]] = {"pi": [256, 256], "qf": [1024, 1024]}

    policy_delay = 3
    batch_norm_momentum: float = setting(
        default=0.01, says="how far a batch moves the running statistics", above=0, most=1
    )
    batch_norm_eps: float = setting(default=0.001, says="added to variances", above=0)
    renorm_warmup_steps: int = setting(
        default=100_000,
        says="batches with plain batch normalisation, before the correction to running statistics",
        least=0,
    )
    tau = fixed(1.0)
    target_update_interval = fixed(1)
    layer_norm, dropout_rate, target_subset = fixed(False), fixed(0.0), fixed(None)

    @property
    def renorm(self) -> tuple[float, float, int]:
        """Momentum, ε and warm-up of every BatchRenorm."""
        return self.batch_norm_momentum, self.batch_norm_eps, self.renorm_warmup_steps

    # ---------------------------------------------------------------- networks

    def build_network(self) -> None:
        super().build_network()
        critics = self.network.critics
        if not any(isinstance(part, BatchRenorm) for part in critics.modules()):
            raise UsageError(
                "network: CrossQ has no target network and its critics need BatchRenorm layers of "
                "rl_modules.networks.batch_renorm; add them, or take SAC"
            )

    def make_policy(self, width: int, net_arch: Sequence[int]) -> nn.Module:
        policy: Any = super().make_policy(width, net_arch)
        policy.trunk = renormalized(policy.trunk, *self.renorm)
        return policy

    def make_critics(self, width: int, net_arch: Sequence[int]) -> nn.Module:
        return RenormalizedCritics(
            self.observation_space, width, self.n_critics, net_arch, self.activation_fn, self.n_outputs, self.renorm
        )

    def make_target(self) -> Any:
        """Returns an empty module, because the critics themselves compute the targets."""
        return nn.Module()

    # ---------------------------------------------------------------- learning

    @_disable_dynamo(recursive=False)
    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        lists, ent_coef = self.lists, self.ent_coef
        here, after = batch["noise"].unbind(1)
        with torch.no_grad():
            next_action, next_log_prob = self.network.policy.sample(batch["next_observation"], after)
        q, next_q = self.joint_values(batch, next_action)
        target = self.td_target(batch, next_q, next_log_prob, ent_coef)
        critic_loss = self.critic_loss(q[..., 0], target, batch.get("weight"))
        self.step(lists["critics"], self.gradients_of(critic_loss, lists["critics"]))
        self.record(critic_loss=critic_loss, ent_coef=ent_coef)
        loss = critic_loss.detach()
        if (self.n_updates + 1) % self.policy_delay == 0:
            loss = loss + self.update_policy(batch["observation"], here, ent_coef)
        if "index" in batch:
            self.td_error = self.absolute_error(q.detach(), target)
        self.finish_update()
        return loss

    def joint_values(self, batch: Minibatch, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Q(s, a) with gradient and Q(s', a') without, [K, B, n_outputs] each, from one forward pass."""
        both = torch.utils._pytree.tree_map(
            lambda now, then: torch.cat([now, then]), batch["observation"], batch["next_observation"]
        )
        with batch_statistics(self.network.critics):
            values = self.network.critics(both, torch.cat([batch["action"], next_action]))
        q, next_q = values.chunk(2, dim=1)
        return q, next_q.detach()

    def update_policy(self, observation: Any, noise: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Takes one step of α and one of the policy; returns the policy's loss, a scalar.

        Args:
            observation: [B, *obs].
            noise: standard normal numbers of ã, [B, A].
            ent_coef: α.
        """
        network, lists = self.network, self.lists
        with batch_statistics(network.policy):
            action, log_prob = network.policy.sample(observation, noise)
        policy_loss = self.actor_loss(network.critics(observation, action, frozen=True), log_prob, ent_coef)
        parameters, gradients = lists["policy"], self.gradients_of(policy_loss, lists["policy"])
        self.record(actor_loss=policy_loss)
        if self.log_ent_coef is not None and self.log_ent_coef.requires_grad:
            ent_coef_loss = self.ent_coef_loss(self.log_ent_coef, log_prob.detach())
            gradients += self.gradients_of(ent_coef_loss, [self.log_ent_coef])
            parameters = [*parameters, self.log_ent_coef]
            self.record(ent_coef_loss=ent_coef_loss)
        self.step(parameters, gradients)
        return policy_loss.detach()

    # ---------------------------------------------------------------- pieces to override

    # SAC's `td_target` computes a' and its value; here the pass that computed Q(s, a) has done so.
    def td_target(  # type: ignore[override]
        self, batch: Minibatch, next_q: Tensor, log_prob: Tensor, ent_coef: Tensor | float
    ) -> Tensor:
        """Returns the regression target of the critics, [B].

        Args:
            batch: what ``prepare`` returned for a minibatch.
            next_q: Q(s', a') of every critic, [K, B, n_outputs].
            log_prob: log π(a'|s') in nats, [B].
            ent_coef: α.
        """
        smallest = next_q[..., 0].amin(0)
        return F.soft_q_target(batch["reward"], batch["terminated"], smallest, log_prob, ent_coef, batch["discount"])

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Adam with β₁ = 0.5 for policy and critics, as sb3-contrib's."""
        networks = [parameter for parameter in parameters if parameter is not self.log_ent_coef]
        groups: list[dict[str, Any]] = [{"params": networks, "betas": (0.5, 0.999)}]
        if self.log_ent_coef is not None:
            groups.append({"params": [self.log_ent_coef]})
        return adam(self, groups, lr=self.default_learning_rate, eps=1e-8)


class RenormalizedCritics(Critics):
    """:class:`~rl_modules.networks.critics.Critics` with a BatchRenorm before every layer."""

    def __init__(
        self,
        observation_space: Any,
        width: int,
        n_critics: int,
        net_arch: Sequence[int],
        activation_fn: str = "relu",
        n_outputs: int = 1,
        renorm: tuple[float, float, int] = (0.01, 0.001, 100_000),
    ) -> None:
        super().__init__(observation_space, width, n_critics, net_arch, activation_fn, n_outputs)
        self.renorms = nn.ModuleList(BatchRenorm(layer.weight.shape[1], n_critics, *renorm) for layer in self.layers)

    def forward(self, observation: Any, action: Tensor, only_first: bool = False, frozen: bool = False) -> Tensor:
        """Action values; arguments as in :class:`~rl_modules.networks.critics.Critics`, ``frozen`` saves nothing."""
        features = self.encoder(observation)
        x = torch.cat([features, action.to(features.dtype)], dim=1).to(self.layers[0].weight.dtype)
        x = x.expand(self.n_critics, -1, -1)
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            x = self.activation(torch.baddbmm(layer.bias, call(self.renorms[i], x), layer.weight))
        x = last_layer(last, call(self.renorms[-1], x))
        return x[:1] if only_first else x
