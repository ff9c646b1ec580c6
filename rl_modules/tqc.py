"""Truncated quantile critics."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.action_noise import ActionNoise
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.checks import at_least
from rl_modules.common.errors import UsageError
from rl_modules.common.import_path import Custom
from rl_modules.sac import SAC


class TQC(SAC):
    """SAC with critics that predict quantiles of the return and targets that drop the largest ones.

    Kuznetsov et al. 2020, arXiv:2005.04269. Each of K critics predicts N quantiles. Of the K·N target quantiles of
    (s', a'), sorted, the largest K·top_quantiles_to_drop_per_net are dropped; each remaining quantile gives a target

        y_j = r + γ (1 - terminated) (z_j - α log π(a'|s')),

    and the critics minimise the quantile Huber loss, the mean over critics, quantiles and targets. The policy maximises
    the mean of all quantiles. The rest is SAC. Names and defaults are those of sb3-contrib.

    Args:
        gamma: discount γ per transition, in [0, 1].
        tau: step of the target critics per update, in (0, 1].
        ent_coef: entropy coefficient α, in units of reward per nat: a number ≥ 0, ``auto`` to learn it from 1, or
            ``auto_<number>`` to learn it from that number.
        target_entropy: target of the policy's entropy, in nats, for a learned α; ``auto``: minus the number of action
            dimensions.
        target_update_interval: updates between two updates of the target critics.
        top_quantiles_to_drop_per_net: target quantiles left out per critic, in [0, n_quantiles).
        n_quantiles: N, quantiles per critic.
        n_critics: K, number of critics.
        action_noise: added to the policy's samples in training, in units of half the action's range; None: none.
        net_arch: hidden widths of policy and critics, or ``{"pi": [...], "qf": [...]}``; None: [256, 256], and none
            after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        learning_rate: of policy, critics and α; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0,
            points such as ``0:3e-4, 1:0``, or None for the optimizer's own (Adam: 3e-4).
        optimizer: callable from parameters to an optimizer; None: Adam.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose weights a ``fit`` starts from; None: new weights.
        use_sde: explore by generalized state-dependent noise (gSDE, arXiv:2005.05719), for Box actions: a matrix per
            environment turns the policy's last features into noise.
        sde_sample_freq: steps of a rollout after which new matrices are drawn; -1: once per ``train_freq`` steps.
        log_std_init: initial log standard deviation of the matrices' entries; only ``use_sde`` reads it.
        network: module class or callable that makes the whole network from both spaces (``policy`` and ``critics``): an
            import path, or class_path with init_args; None: built from the arguments above.
        features_extractor: likewise, for the part that turns an observation into ``features_dim`` numbers; None: by
            the space.
    """

    def __init__(
        self,
        gamma: float = 0.99,
        tau: float = 0.005,
        ent_coef: float | str = "auto",
        target_entropy: float | str = "auto",
        target_update_interval: int = 1,
        top_quantiles_to_drop_per_net: int = 2,
        n_quantiles: int = 25,
        n_critics: int = 2,
        action_noise: ActionNoise | dict[str, Any] | None = None,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: str = "relu",
        learning_rate: float | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        log_std_init: float = -3.0,
        network: Custom | None = None,
        features_extractor: Custom | None = None,
    ) -> None:
        super().__init__(
            gamma, tau, ent_coef, target_entropy, target_update_interval, n_critics, action_noise, net_arch,
            activation_fn, learning_rate, optimizer, lr_scheduler, log_every, observation_space, action_space, init_from
        )  # fmt: skip
        self.n_outputs = at_least("n_quantiles", n_quantiles)
        if not 0 <= top_quantiles_to_drop_per_net < n_quantiles:
            raise UsageError(f"top_quantiles_to_drop_per_net={top_quantiles_to_drop_per_net} must lie in "
                             f"[0, n_quantiles={n_quantiles})")  # fmt: skip
        #: How many of the sorted target quantiles are kept.
        dropped = at_least("top_quantiles_to_drop_per_net", top_quantiles_to_drop_per_net, 0)
        self.n_kept = self.n_critics * (self.n_outputs - dropped)

    def td_target(self, batch: dict[str, Any], noise: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the targets of every quantile, [B, n_kept]; arguments as in SAC."""
        action, log_prob = self.network.policy.sample(batch["next_observation"], noise)
        quantiles = self.target_network(batch["next_observation"], action)
        kept = quantiles.movedim(0, 1).flatten(1).sort(1).values[:, : self.n_kept]
        value = torch.where(batch["terminated"][:, None], 0.0, kept - (ent_coef * log_prob)[:, None])
        return batch["reward"][:, None] + batch["discount"][:, None] * value

    def critic_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the quantile Huber loss of all critics, a scalar.

        Args:
            q: predicted quantiles, [K, B, N], or [K, B] of one.
            target: [B, n_kept].
            weight: importance weights of prioritised replay, [B].
        """
        q = q if q.ndim == 3 else q.unsqueeze(-1)
        k = len(q)
        weight = None if weight is None else weight.repeat(k)
        return F.quantile_huber_loss(q.flatten(0, 1), target.repeat(k, 1), weight) / q.shape[-1]

    def actor_loss(self, q: Tensor, log_prob: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the policy's loss, a scalar; the value of an action is the mean of all quantiles."""
        return (ent_coef * log_prob).mean() - q.mean()

    def absolute_error(self, q: Tensor, target: Tensor) -> Tensor:
        """Returns |δ| per transition for prioritised replay, [B], between the means of predicted and target
        quantiles.
        """
        return (q.mean((0, 2)) - target.mean(1)).abs()
