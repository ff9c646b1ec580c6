"""Twin delayed deep deterministic policy gradient."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.contract import Minibatch
from rl_modules.core.settings import fixed, setting
from rl_modules.networks.critics import DeterministicPolicy
from rl_modules.off_policy import OffPolicyActorCritic


class TD3(OffPolicyActorCritic):
    """Twin delayed DDPG: a deterministic policy with twin critics, target smoothing and delayed policy updates.

    Fujimoto et al. 2018, arXiv:1802.09477. Per minibatch of replayed transitions

        critics   Σ_k E[(Q_k(s, a) - y)²],   y = r + γ (1 - terminated) min_k Q_target,k(s', a')
                  a' = clip(μ_target(s') + clip(ε, -c, c), -1, 1),   ε ~ N(0, target_policy_noise²)
        policy    -E[Q_1(s, μ(s))],   in every ``policy_delay``-th update, as is the move of both target networks

    n-step targets (the datamodule's ``n_steps``) and importance weights (its ``prioritized_replay``) change the
    critics' loss. The names and defaults are Stable-Baselines3's. Departure from it: the learning rate changes once
    per round of experience.

    Optimization is manual: the Trainer refuses ``gradient_clip_val``, and ``global_step`` counts updates.
    """

    default_net_arch = (400, 300)
    default_learning_rate = 1e-3

    policy_delay: int = setting(
        default=2, says="updates of the critics per update of policy and target networks", least=1
    )
    target_policy_noise: float = setting(
        default=0.2,
        says="standard deviation of the noise on the target policy's actions, in units of half the action's range",
        least=0,
    )
    target_noise_clip: float = setting(default=0.5, says="bound on that noise", least=0)

    # ---------------------------------------------------------------- networks

    def make_policy(self, width: int, net_arch: Sequence[int]) -> torch.nn.Module:
        return DeterministicPolicy(self.observation_space, width, net_arch, self.activation_fn)

    def make_target(self) -> torch.nn.Module:
        return copy.deepcopy(self.network)

    def choose(self, observation: Any, generator: torch.Generator | None, deterministic: bool) -> Tensor:
        return self.network.policy(observation)

    def noise_shape(self) -> tuple[int, ...]:
        return (self.network.bounds.width,)

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        lists, network = self.lists, self.network
        with torch.no_grad():
            target = self.td_target(batch)
        q = network.critics(batch["observation"], batch["action"])[..., 0]
        loss = self.critic_loss(q, target, batch.get("weight"))
        self.step(lists["critics"], self.gradients_of(loss, lists["critics"]))
        self.record(critic_loss=loss)
        loss = loss.detach()
        if (self.n_updates + 1) % self.policy_delay == 0:
            policy_loss = self.actor_loss(batch)
            self.step(lists["policy"], self.gradients_of(policy_loss, lists["policy"]))
            self.update_target()
            self.record(actor_loss=policy_loss)
            loss = loss + policy_loss.detach()
        if "index" in batch:
            self.td_error = (q.detach() - target).abs().mean(0)
        self.finish_update()
        return loss

    # ---------------------------------------------------------------- pieces to override

    def target_action(self, batch: Minibatch) -> Tensor:
        """Returns the target policy's actions in s' with clipped noise, [B, A]."""
        action = self.target_network.policy(batch["next_observation"])
        noise = (self.target_policy_noise * batch["noise"]).clamp(-self.target_noise_clip, self.target_noise_clip)
        return (action + noise).clamp(-1.0, 1.0)

    def td_target(self, batch: Minibatch) -> Tensor:
        """Returns the regression target of the critics, [B]."""
        next_q = self.target_network.critics(batch["next_observation"], self.target_action(batch))[..., 0].amin(0)
        return batch["reward"] + batch["discount"] * torch.where(batch["terminated"], 0.0, next_q)

    def actor_loss(self, batch: Minibatch) -> Tensor:
        """Returns the policy's loss, a scalar: minus the first critic's value of its actions."""
        action = self.network.policy(batch["observation"])
        return -self.network.critics(batch["observation"], action, only_first=True, frozen=True).mean()


class DDPG(TD3):
    """Deep deterministic policy gradient: TD3 with one critic, no delay and no noise in its targets.

    Lillicrap et al. 2016, arXiv:1509.02971. Per minibatch of replayed transitions

        critic    E[(Q(s, a) - y)²],   y = r + γ (1 - terminated) Q_target(s', μ_target(s'))
        policy    -E[Q(s, μ(s))]

    and both target networks move by τ. The names and defaults are Stable-Baselines3's.
    """

    policy_delay = fixed(1)
    target_policy_noise, target_noise_clip = fixed(0.0), fixed(0.0)
    n_critics = fixed(1)

    def noise_shape(self) -> tuple[int, ...]:
        # No noise is drawn.
        return (0,)

    def target_action(self, batch: Minibatch) -> Tensor:
        """Returns the target policy's actions in s', [B, A]."""
        action: Tensor = self.target_network.policy(batch["next_observation"])
        return action
