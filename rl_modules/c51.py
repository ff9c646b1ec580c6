"""C51: DQN with the distribution of the return on a fixed support; with all of DQN's variants, Rainbow."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import mask_logits, split_mask
from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed, setting
from rl_modules.dqn import DQN
from rl_modules.fast.adam import adam
from rl_modules.networks.q_network import QNetwork, of_actions


class C51(DQN):
    """Deep Q-learning with the probabilities of N returns instead of their mean.

    Bellemare et al. 2017, arXiv:1707.06887. Per minibatch of replayed transitions, one step on

        L = -E[Σ_i m_i log p_i(s, a)],   m = Φ(r + γ (1 - terminated) z, p'(s', a*)),   z_i = v_min + i Δz

    with p(s, a) the softmax of the network's outputs, Φ the projection onto the support z, p' the target network's
    probabilities and a* the action of the largest mean Σ_i z_i p'_i(s', ·); with ``double``, of the network's own.
    Dueling heads, n-step targets, prioritised replay and action masks are those of :class:`~rl_modules.dqn.DQN`; the
    priority of a transition is KL(m ‖ p). ``double``, ``dueling`` and ``noisy`` with the datamodule's ``n_steps`` and
    ``prioritized_replay`` are Rainbow (Hessel et al. 2018, arXiv:1710.02298). Names are CleanRL's; the support is the
    papers', for returns of clipped rewards.
    """

    n_atoms: int = setting(default=51, says="N, points of the support", least=2)
    v_min: float = setting(
        default=-10.0, says="the smallest return of the support, in units of reward; smaller ones count as it"
    )
    v_max: float = setting(default=10.0, says="the largest one, above ``v_min``; larger ones count as it")
    exploration_final_eps = 0.01
    max_grad_norm = None
    loss = fixed("huber")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.v_min < self.v_max:
            raise UsageError(f"v_max={self.v_max} must be above v_min={self.v_min}")

    @property
    def n_numbers(self) -> int:
        return self.n_atoms

    @property
    def support(self) -> Tensor:
        """z, the returns of the support, [N], in units of reward."""
        return torch.linspace(self.v_min, self.v_max, self.n_atoms, dtype=torch.float32, device=self.device)

    def minibatch_loss(self, batch: Minibatch) -> Tensor:
        """Returns the loss of a minibatch, a scalar."""
        log_prob = of_actions(self.log_probs(self.network, batch["observation"]), batch["action"])
        target = self.td_target(batch) if self.uses_double else batch["target"]
        loss = self.td_loss(log_prob, target, batch.get("weight"))
        if "index" in batch:
            self.td_error = torch.nn.functional.kl_div(log_prob.detach(), target, reduction="none").sum(1).clamp_min(0)
        if self.run.logs_this_epoch:
            self.record(loss=loss, q_mean=(log_prob.detach().exp() * self.support).sum(1).mean())
        return loss

    # ---------------------------------------------------------------- pieces to override

    def log_probs(self, network: QNetwork, observation: Any) -> Tensor:
        """The logarithms of p(s, ·), [B, N, A], of the network or the target network, masked actions included."""
        return network(split_mask(observation)[0]).log_softmax(1)

    def mean_return(self, log_prob: Tensor, observation: Any) -> Tensor:
        """Q(s, ·), [B, A]: the mean of the returns; that of masked actions is -1e8."""
        # Not by einsum: autocast computes products of matrices in bfloat16, whose numbers around 10 are 1/16 apart.
        q = (log_prob.exp() * self.support.to(log_prob.dtype)[:, None]).sum(1)
        mask = split_mask(observation)[1]
        return q if mask is None else mask_logits(q, mask)

    def q_values(self, network: QNetwork, observation: Any) -> Tensor:
        """Q(s, ·), [B, A], of the network or the target network; that of masked actions is -1e8."""
        return self.mean_return(self.log_probs(network, observation), observation)

    def target_values(self, observation: Any) -> Tensor:
        """The target network's probabilities, [B, N, A]; without ``double`` those of its best action, [B, N, 1]."""
        log_prob = self.log_probs(self.target_network, observation)
        if not self.uses_double:
            log_prob = of_actions(log_prob, self.mean_return(log_prob, observation).argmax(1))[..., None]
        return log_prob.exp()

    def td_target(self, batch: Minibatch) -> Tensor:
        """Returns m, the target probabilities of the returns of (s, a), [B, N]."""
        following = batch["next_q"][..., 0]
        if self.uses_double:
            with torch.no_grad():
                action = self.q_values(self.network, batch["next_observation"]).argmax(1)
            following = of_actions(batch["next_q"], action)
        return F.categorical_projection(
            batch["reward"], batch["terminated"], following, batch["discount"], self.v_min, self.v_max
        )

    def td_loss(self, q: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the cross-entropy, a scalar; ``q`` are log-probabilities and ``target`` probabilities, [B, N]."""
        loss = -(target * q).sum(1)
        return loss.mean() if weight is None else (weight * loss).mean()

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """Returns Adam at 2.5e-4 with eps 0.01 / batch_size, as in the paper."""
        return adam(self, parameters, lr=2.5e-4, eps=0.01 / cast(Any, self.source).batch_size)
