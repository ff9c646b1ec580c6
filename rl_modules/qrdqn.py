"""Quantile regression DQN."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.checks import at_least
from rl_modules.common.import_path import Custom
from rl_modules.common.masks import mask_logits, split_mask
from rl_modules.custom_networks import custom_q_network
from rl_modules.dqn import DQN
from rl_modules.q_network import DistributionalQNetwork, QNetwork, of_actions


class QRDQN(DQN):
    """Deep Q-learning with the quantiles of the return instead of its mean.

    Dabney et al. 2018, arXiv:1710.10044. Per minibatch of replayed transitions, one step on

        L = E[Σ_i mean_j ρ_{τ_i}(y_j - θ_i(s, a))],   y_j = r + γ (1 - terminated) θ'_j(s', a*)

    with ρ_τ the quantile Huber loss, τ_i = (i + ½) / N, θ' the target network and a* the action of the largest mean of
    θ'(s', ·); with ``double``, of the network's own. Dueling heads, n-step targets, prioritised replay and action masks
    are those of :class:`~rl_modules.dqn.DQN`. The names and defaults are sb3-contrib's.

    Args:
        n_quantiles: N, quantiles per action.
        gamma: discount γ per transition, in [0, 1].
        target_update_interval: transitions, over all environments and ranks, between updates of the target network.
        tau: step of the target network towards the network, in (0, 1]; 1: copy.
        exploration_fraction: share of ``total_timesteps`` over which ε decays, in (0, 1].
        exploration_initial_eps: initial ε, the probability of a random action.
        exploration_final_eps: final ε.
        double: select the next action with the network, evaluate it with the target network.
        dueling: V(s) and advantages in separate streams.
        max_grad_norm: global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None:
            no clipping.
        net_arch: hidden widths; None: [64, 64], and none after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        learning_rate: a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points such as
            ``0:3e-4, 1:0``, or None for the optimizer's own (Adam: 5e-5).
        optimizer: callable from parameters to an optimizer; None: Adam with eps 0.01 / batch_size.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose weights a ``fit`` starts from; None: new weights.
        noisy: noisy linear layers after the encoder (arXiv:1706.10295), with new noise at every step and minibatch;
            evaluation uses their means. For exploration by noise alone set exploration_initial_eps and
            exploration_final_eps to 0.
        network: module class or callable that makes the whole network from both spaces (quantiles): an
            import path, or class_path with init_args; None: built from the arguments above.
        features_extractor: likewise, for the part that turns an observation into ``features_dim`` numbers; None: by
            the space.
    """

    def __init__(
        self,
        n_quantiles: int = 200,
        gamma: float = 0.99,
        target_update_interval: int = 10_000,
        tau: float = 1.0,
        exploration_fraction: float = 0.005,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.01,
        double: bool = False,
        dueling: bool = False,
        max_grad_norm: float | None = None,
        net_arch: list[int] | None = None,
        activation_fn: str = "relu",
        learning_rate: float | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
        noisy: bool = False,
        network: Custom | None = None,
        features_extractor: Custom | None = None,
    ) -> None:
        super().__init__(
            gamma, target_update_interval, tau, exploration_fraction, exploration_initial_eps, exploration_final_eps,
            double, dueling, "huber", max_grad_norm, net_arch, activation_fn, learning_rate, optimizer, lr_scheduler,
            log_every, observation_space, action_space, init_from,
        )  # fmt: skip
        self.n_quantiles = at_least("n_quantiles", n_quantiles)

    def make_network(self) -> QNetwork:
        """Builds the quantile network from the hyperparameters."""
        hp: Any = self.hparams
        if hp.get("network") is not None:
            n_actions = int(self.action_space.n)
            custom: Any = custom_q_network(hp.network, self.observation_space, self.n_quantiles, n_actions)
            return custom
        return DistributionalQNetwork(
            self.observation_space, int(self.action_space.n), self.n_quantiles, hp.net_arch, hp.activation_fn,
            hp.dueling,
        )  # fmt: skip

    def minibatch_loss(self, batch: dict[str, Any]) -> Tensor:
        """Returns the loss of a minibatch, a scalar."""
        quantiles = of_actions(self.quantiles(self.network, batch["observation"]), batch["action"])
        target = self.td_target(batch) if self.uses_double else batch["target"]
        loss = self.td_loss(quantiles, target, batch.get("weight"))
        if "index" in batch:
            self.td_error = (quantiles.detach().mean(1) - target.mean(1)).abs()
        if self.logs_this_epoch:
            self.record(loss=loss, q_mean=quantiles.mean())
        return loss

    # ---------------------------------------------------------------- pieces to override

    def quantiles(self, network: QNetwork, observation: Any) -> Tensor:
        """θ(s, ·), [B, N, A], of the network or the target network; those of masked actions are -1e8."""
        observation, mask = split_mask(observation)
        quantiles = network(observation)
        return quantiles if mask is None else mask_logits(quantiles, mask[:, None])

    def mean_return(self, quantiles: Tensor) -> Tensor:
        """Returns Q(s, ·), [B, A], the mean of θ(s, ·), [B, N, A]. Actions are chosen by it, in targets too.

        A risk-sensitive subclass returns another statistic.
        """
        return quantiles.mean(1)

    def q_values(self, network: QNetwork, observation: Any) -> Tensor:
        """Q(s, ·), [B, A], of the network or the target network."""
        return self.mean_return(self.quantiles(network, observation))

    def target_values(self, observation: Any) -> Tensor:
        """Returns the target network's quantiles, [B, N, A]."""
        return self.quantiles(self.target_network, observation)

    def td_target(self, batch: dict[str, Any]) -> Tensor:
        """Returns the target quantiles of Z(s, a), [B, N]."""
        next_quantiles = batch["next_q"]
        with torch.no_grad():
            if self.uses_double:
                q = self.q_values(self.network, batch["next_observation"])
            else:
                q = self.mean_return(next_quantiles)
        following = torch.where(batch["terminated"][:, None], 0.0, of_actions(next_quantiles, q.argmax(1)))
        return batch["reward"][:, None] + batch["discount"][:, None] * following

    def td_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the quantile Huber loss, a scalar; ``q`` and ``target`` are [B, N]."""
        return F.quantile_huber_loss(q, target, weight)

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns Adam at 5e-5 with eps 0.01 / batch_size, as in the paper and sb3-contrib."""
        return self.adam(parameters, lr=5e-5, eps=0.01 / cast(Any, self.source).batch_size)
