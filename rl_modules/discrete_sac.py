"""Soft actor-critic for discrete actions."""

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules import functional as F
from rl_modules.common.masks import split_mask
from rl_modules.common.modules import tree_leaves
from rl_modules.contract import Minibatch, Replayed
from rl_modules.core.settings import Converted, changed, fixed
from rl_modules.distributions.categorical import Categorical
from rl_modules.exploration import require_finite_actions
from rl_modules.functional.checks import as_float
from rl_modules.networks.critics import Critics, PolicyAndCritics, Tower
from rl_modules.networks.layers import tower_widths
from rl_modules.networks.q_network import apply_tower
from rl_modules.sac import SAC


class LogitsPolicy(Tower):
    """Logits of all actions, [B, *obs] → [B, A] float32."""

    def forward(self, observation: Any) -> Tensor:
        return as_float(apply_tower(self.trunk, self.head, self.encoder(observation)))


class DiscreteSAC(SAC):
    """Soft actor-critic for discrete actions: expectations over all actions instead of samples.

    Christodoulou 2019, arXiv:1910.07207. Per minibatch of replayed transitions, in the order of :class:`SAC`,

        critics   ½ Σ_k E[(Q_k(s, a) - y)²],   y = r + γ (1 - terminated) V(s')
                  V(s') = Σ_a π(a|s') (min_k Q_target,k(s', a) - α log π(a|s'))
        α         -E[log α Σ_a π(a|s) (log π(a|s) + target_entropy)]
        policy    E[Σ_a π(a|s) (α log π(a|s) - min_k Q_k(s, a))]

    Departures from the paper: its update of α has α where log α stands here, as in the continuous SAC; the target of
    the entropy is that of its code, 0.98 log A, its text does not name one; rates, sizes of networks and minibatches,
    and an update after every transition are those of :class:`SAC`. With ``action_mask`` forbidden actions have
    probability 0, and the target of the entropy stays that of all A.
    """

    supported_action_spaces = (spaces.Discrete,)
    target_entropy: Converted[float | str, float] = changed(
        says="target of the policy's entropy, in nats, for a learned α; ``auto``: 0.98 log A for A actions"
    )
    action_noise, network, target_subset = fixed(None), fixed(None), fixed(None)
    use_sde, sde_sample_freq, log_std_init = fixed(False), fixed(), fixed()

    def check_spaces(self) -> None:
        """Refuses an action space without a finite number of actions."""
        require_finite_actions(type(self).__name__, self.action_space)

    # ---------------------------------------------------------------- networks

    def build_network(self) -> None:
        space, n_actions = self.observation_space, int(self.action_space.n)
        pi, qf = tower_widths(space, self.net_arch, ("pi", "qf"), self.default_net_arch)
        arguments = (qf, self.activation_fn, n_actions, self.layer_norm, self.dropout_rate)
        critics = Critics(space, 0, self.n_critics, *arguments)
        self.network = PolicyAndCritics(LogitsPolicy(space, n_actions, pi, self.activation_fn), critics, None)
        self.target_network = self.make_target().requires_grad_(False)
        self.begin_ent_coef(0.98 * math.log(n_actions))

    def policy(self, observation: Any) -> Categorical:
        """π(·|s) of a batch of observations."""
        observation, mask = split_mask(observation)
        policy = Categorical(self.network.policy(observation))
        return policy if mask is None else policy.masked(mask)

    def q_values(self, critics: Critics, observation: Any) -> Tensor:
        """Q_k(s, ·) of critics or target critics, [K, B, A]."""
        observation, _ = split_mask(observation)
        first = tree_leaves(observation)[0]
        return critics(observation, first.new_empty((len(first), 0)))

    # ---------------------------------------------------------------- acting and learning

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Samples actions, [N], or returns the most likely ones."""
        policy = self.policy(observation)
        return {"action": policy.mode() if deterministic else policy.sample(generator)}

    def prepare(self, sample: Replayed) -> Minibatch:
        """Computes, for all minibatches of a round at once, rewards and discounts over n steps."""
        kept: Any = {k: x for k, x in sample.items() if k != "n_steps"}
        kept["reward"], kept["discount"] = F.n_step_rewards(sample["reward"], sample["n_steps"], self.gamma)
        return kept

    @_disable_dynamo(recursive=False)
    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        lists, ent_coef = self.lists, self.ent_coef
        with torch.no_grad():
            target = self.expected_target(batch, ent_coef)
        q = self.q_values(self.network.critics, batch["observation"])
        taken = q.gather(2, batch["action"].long()[None, :, None].expand(len(q), -1, 1))[..., 0]
        critic_loss = self.critic_loss(taken, target, batch.get("weight"))
        parameters, gradients = lists["critics"], self.gradients_of(critic_loss, lists["critics"])
        metrics: dict[str, Tensor | float] = {"critic_loss": critic_loss, "ent_coef": ent_coef}
        moves_policy = (self.n_updates + 1) % self.policy_delay == 0
        log_prob = self.policy(batch["observation"]).log_p if moves_policy else None
        if log_prob is not None and self.log_ent_coef is not None and self.log_ent_coef.requires_grad:
            expected = (log_prob.exp() * log_prob).sum(-1).detach()
            metrics["ent_coef_loss"] = ent_coef_loss = self.ent_coef_loss(self.log_ent_coef, expected)
            gradients += self.gradients_of(ent_coef_loss, [self.log_ent_coef])
            parameters = [*parameters, self.log_ent_coef]
        self.step(parameters, gradients)
        loss = critic_loss.detach()
        if log_prob is not None:
            with torch.no_grad():
                q_policy = self.q_values(self.network.critics, batch["observation"])
            metrics["actor_loss"] = policy_loss = self.actor_loss(q_policy, log_prob, ent_coef)
            self.step(lists["policy"], self.gradients_of(policy_loss, lists["policy"]))
            loss = loss + policy_loss.detach()
        self.finish_update()
        if self.n_updates % self.target_update_interval == 0:
            self.update_target()
        if "index" in batch:
            self.td_error = (taken.detach() - target).abs().mean(0)
        self.record(**metrics)
        return loss

    # ---------------------------------------------------------------- pieces to override

    def expected_target(self, batch: Minibatch, ent_coef: Tensor | float) -> Tensor:
        """Returns the regression target of the critics, [B].

        Args:
            batch: what ``prepare`` returned for a minibatch.
            ent_coef: α.
        """
        log_prob = self.policy(batch["next_observation"]).log_p
        next_q = self.q_values(self.target_network, batch["next_observation"]).amin(0)
        value = F.soft_value(next_q, log_prob, ent_coef)
        # The value has the entropy already.
        return F.soft_q_target(
            batch["reward"], batch["terminated"], value, torch.zeros_like(value), 0.0, batch["discount"]
        )

    def actor_loss(self, q: Tensor, log_prob: Tensor, ent_coef: Tensor | float) -> Tensor:
        """Returns the policy's loss, a scalar.

        Args:
            q: values of all actions, [K, B, A].
            log_prob: log π(·|s) in nats, [B, A].
            ent_coef: α.
        """
        return -F.soft_value(q.amin(0), log_prob, ent_coef).mean()
