"""Quantile regression DQN."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.masks import mask_logits, split_mask
from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed, setting
from rl_modules.dqn import DQN
from rl_modules.fast.adam import adam
from rl_modules.networks.q_network import QNetwork, of_actions


class QRDQN(DQN):
    """Deep Q-learning with the quantiles of the return instead of its mean.

    Dabney et al. 2018, arXiv:1710.10044. Per minibatch of replayed transitions, one step on

        L = E[Σ_i mean_j ρ_{τ_i}(y_j - θ_i(s, a))],   y_j = r + γ (1 - terminated) θ'_j(s', a*)

    with ρ_τ the quantile Huber loss, τ_i = (i + ½) / N, θ' the target network and a* the action of the largest mean of
    θ'(s', ·); with ``double``, of the network's own. Dueling heads, n-step targets, prioritised replay and action masks
    are those of :class:`~rl_modules.dqn.DQN`. The names and defaults are sb3-contrib's.
    """

    n_quantiles: int = setting(default=200, says="N, quantiles per action", least=1)
    exploration_fraction = 0.005
    exploration_final_eps = 0.01
    max_grad_norm = None
    loss = fixed("huber")

    @property
    def n_numbers(self) -> int:
        return self.n_quantiles

    def minibatch_loss(self, batch: Minibatch) -> Tensor:
        """Returns the loss of a minibatch, a scalar."""
        quantiles = of_actions(self.quantiles(self.network, batch["observation"]), batch["action"])
        target = self.td_target(batch) if self.uses_double else batch["target"]
        loss = self.td_loss(quantiles, target, batch.get("weight"))
        if "index" in batch:
            self.td_error = (quantiles.detach().mean(1) - target.mean(1)).abs()
        if self.run.logs_this_epoch:
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

    def td_target(self, batch: Minibatch) -> Tensor:
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
        return adam(self, parameters, lr=5e-5, eps=0.01 / cast(Any, self.source).batch_size)
