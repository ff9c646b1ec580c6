"""Twin delayed deep deterministic policy gradient."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_modules.action_noise import ActionNoise
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.checks import at_least
from rl_modules.common.errors import UsageError
from rl_modules.common.import_path import Custom
from rl_modules.critics import DeterministicPolicy
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

    Args:
        gamma: discount γ per transition, in [0, 1].
        tau: step of the target networks per update, in (0, 1].
        policy_delay: updates of the critics per update of the policy and the target networks, ≥ 1.
        target_policy_noise: standard deviation of the noise in the target's action, in units of half its range, ≥ 0.
        target_noise_clip: bound c of that noise, ≥ 0.
        n_critics: number of critics; targets use the smallest value of them.
        action_noise: added to the actions in training, in units of half their range; None: no exploration.
        net_arch: hidden widths of policy and critics, or ``{"pi": [...], "qf": [...]}``; None: [400, 300], and none
            after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        learning_rate: of policy and critics; a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points
            such as ``0:3e-4, 1:0``, or None for the optimizer's own (Adam: 1e-3).
        optimizer: callable from parameters to an optimizer; None: Adam.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose weights a ``fit`` starts from; None: new weights.
        network: module class or callable that makes the whole network from both spaces (``policy`` and ``critics``): an
            import path, or class_path with init_args; None: built from the arguments above.
        features_extractor: likewise, for the part that turns an observation into ``features_dim`` numbers; None: by
            the space.
    """

    default_net_arch = (400, 300)
    default_learning_rate = 1e-3

    def __init__(
        self,
        gamma: float = 0.99,
        tau: float = 0.005,
        policy_delay: int = 2,
        target_policy_noise: float = 0.2,
        target_noise_clip: float = 0.5,
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
        network: Custom | None = None,
        features_extractor: Custom | None = None,
    ) -> None:
        super().__init__(
            gamma, tau, n_critics, action_noise, net_arch, activation_fn, learning_rate, optimizer, lr_scheduler,
            log_every, observation_space, action_space, init_from,
        )  # fmt: skip
        for name, value in (("target_policy_noise", target_policy_noise), ("target_noise_clip", target_noise_clip)):
            if not value >= 0:
                raise UsageError(f"{name}={value} must not be negative")
        self.policy_delay = at_least("policy_delay", policy_delay, 1, "update")
        self.target_policy_noise = float(target_policy_noise)
        self.target_noise_clip = float(target_noise_clip)

    # ---------------------------------------------------------------- networks

    def make_policy(self, width: int, net_arch: Sequence[int]) -> torch.nn.Module:
        return DeterministicPolicy(self.observation_space, width, net_arch, self.hparams["activation_fn"])

    def make_target(self) -> torch.nn.Module:
        return copy.deepcopy(self.network)

    def choose(self, observation: Any, generator: torch.Generator | None, deterministic: bool) -> Tensor:
        return self.network.policy(observation)

    def noise_shape(self) -> tuple[int, ...]:
        return (self.network.bounds.width,)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
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

    def target_action(self, batch: dict[str, Any]) -> Tensor:
        """Returns the target policy's actions in s' with clipped noise, [B, A]."""
        action = self.target_network.policy(batch["next_observation"])
        noise = (self.target_policy_noise * batch["noise"]).clamp(-self.target_noise_clip, self.target_noise_clip)
        return (action + noise).clamp(-1.0, 1.0)

    def td_target(self, batch: dict[str, Any]) -> Tensor:
        """Returns the regression target of the critics, [B]."""
        next_q = self.target_network.critics(batch["next_observation"], self.target_action(batch))[..., 0].amin(0)
        return batch["reward"] + batch["discount"] * torch.where(batch["terminated"], 0.0, next_q)

    def actor_loss(self, batch: dict[str, Any]) -> Tensor:
        """Returns the policy's loss, a scalar: minus the first critic's value of its actions."""
        action = self.network.policy(batch["observation"])
        return -self.network.critics(batch["observation"], action, only_first=True, frozen=True).mean()
