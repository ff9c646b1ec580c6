"""Advantage actor-critic."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules import ranks
from rl_modules.actor_critic import ActorCriticModule, sample_or_mode
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.contract import SHORT_ROLLOUTS, Rollout
from rl_modules.common.import_path import Custom
from rl_modules.common.schedules import parse_schedule
from rl_modules.distributions import Distribution


class A2C(ActorCriticModule):
    """Synchronous advantage actor-critic.

    Mnih et al. 2016, arXiv:1602.01783, with synchronous actors. For each rollout, one step on

        L = -E[A log π(a|s)] + vf_coef·E[(V - R)²] - ent_coef·E[H(π)],   R = A + V(s)

    With ``gae_lambda=1``, R is the n-step return of the paper: the rewards to the end of the rollout, then V. The
    names and defaults are Stable-Baselines3's. ``optimizer=rl_modules.optimizers.RMSpropTFLike`` is TensorFlow's
    RMSprop, whose small first steps help if A2C is unstable.

    By default the datamodule yields whole rollouts of five steps once each, and collects many per Lightning epoch.

    Args:
        gamma: discount γ per transition, in [0, 1].
        gae_lambda: λ of generalized advantage estimation, in [0, 1]; 1: n-step returns.
        ent_coef: weight of the entropy bonus, in units of advantage per nat; a number or a schedule.
        vf_coef: weight of the mean squared value error.
        max_grad_norm: global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None:
            no clipping.
        normalize_advantage: whiten the advantages of each rollout.
        use_rms_prop: RMSprop with α 0.99; false: Adam with eps 1e-5. Ignored if ``optimizer`` is given.
        rms_prop_eps: RMSprop's eps.
        net_arch: hidden widths of policy and value towers, or ``{"pi": [...], "vf": [...]}``; None: [64, 64], and none
            after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        log_std_init: initial log standard deviation of Box actions.
        ortho_init: orthogonal initialisation with gains √2, 0.01 (policy head) and 1 (value head).
        learning_rate: a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points such as
            ``0:3e-4, 1:0``, or None for the optimizer's own (7e-4 where none is given).
        optimizer: callable from parameters to an optimizer.
        lr_scheduler: callable from the optimizer to a torch scheduler, stepped once per epoch.
        log_every: epochs between two points of the training curves.
        observation_space: description of the space; None takes the datamodule's.
        action_space: likewise.
        init_from: checkpoint whose weights and normaliser statistics a ``fit`` starts from; None: new weights.
        use_sde: explore by generalized state-dependent noise (gSDE, arXiv:2005.05719), for Box actions: a matrix per
            environment turns the policy's last features into noise. ``log_std_init`` is that of its entries.
        sde_sample_freq: steps of a rollout after which new matrices are drawn; -1: once per rollout.
        network: module class or callable that makes the whole network from both spaces (policy and value): an
            import path, or class_path with init_args; None: built from the arguments above.
        features_extractor: likewise, for the part that turns an observation into ``features_dim`` numbers; None: by
            the space.
    """

    experience = SHORT_ROLLOUTS

    def __init__(
        self,
        gamma: float = 0.99,
        gae_lambda: float = 1.0,
        ent_coef: float | str = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float | None = 0.5,
        normalize_advantage: bool = False,
        use_rms_prop: bool = True,
        rms_prop_eps: float = 1e-5,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        learning_rate: float | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        log_every: int = 1,
        observation_space: dict[str, Any] | None = None,
        action_space: dict[str, Any] | None = None,
        init_from: str | None = None,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        network: Custom | None = None,
        features_extractor: Custom | None = None,
    ) -> None:
        super().__init__(
            gamma, gae_lambda, normalize_advantage, max_grad_norm, learning_rate, optimizer, lr_scheduler, log_every,
            observation_space, action_space, init_from,
        )  # fmt: skip
        self.ent_schedule = parse_schedule(ent_coef, "ent_coef")
        self.ent_coef = self.ent_schedule.initial
        self.vf_coef = float(vf_coef)
        self.use_rms_prop = use_rms_prop
        self.rms_prop_eps = float(rms_prop_eps)

    def idle_arguments(self) -> dict[str, str]:
        idle = super().idle_arguments()
        if self.optimizer_factory is not None:
            idle |= dict.fromkeys(
                ("use_rms_prop", "rms_prop_eps"), "beside optimizer, which has arguments of its own; set them there"
            )
        elif not self.use_rms_prop:
            idle["rms_prop_eps"] = "while use_rms_prop is false; set that to true"
        return idle

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns actions and the values of the states, each [N]."""
        policy, value = self.policy_and_value(observation)
        return {"action": sample_or_mode(policy, generator, deterministic), "value": value}

    def prepare(self, rollout: Rollout) -> dict[str, Any]:
        """Computes advantages and returns of a rollout, whose fields are those of
        :class:`~rl_modules.common.contract.Rollout`.

        Returns:
            The fields that :meth:`training_step` reads: observation, action, value, advantage, returns.
        """
        advantage = self.advantages(rollout)
        returns = advantage + rollout["value"]
        kept = {"observation": rollout["observation"], "action": rollout["action"], "value": rollout["value"]}
        return {**kept, "advantage": advantage, "returns": returns}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        policy, value = self.policy_and_value(batch["observation"])
        return self.minibatch_loss(policy, value, batch)

    def minibatch_loss(self, policy: Distribution, value: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns the loss of one rollout under the current policy and values, a scalar."""
        policy_loss = self.policy_loss(policy.log_prob(batch["action"]), batch)
        value_loss = self.value_loss(value, batch)
        loss = policy_loss + self.vf_coef * value_loss
        if self.ent_coef:
            loss = loss - self.ent_coef * policy.entropy().mean()
        # Diagnosing every one of these small updates would cost 5 % of the run; SB3 logs one in a hundred too.
        if self.logs_this_epoch and self.trainer.is_last_batch:
            self.record(
                policy_gradient_loss=policy_loss,
                value_loss=value_loss,
                entropy_loss=-policy.entropy().detach().mean(),
                loss=loss,
                explained_variance=ranks.explained_variance(batch["value"], batch["returns"], self._is_alone),
            )
        weight = self.rank_weight(len(value))
        return loss if weight == 1.0 else loss * weight

    # ---------------------------------------------------------------- pieces to override

    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns the policy-gradient loss, a scalar."""
        advantage = batch["advantage"]
        if self.normalize_advantage:
            advantage = self.whiten(advantage)
        return F.policy_gradient_loss(log_prob, advantage)

    def default_optimizer(self, parameters: Iterable) -> torch.optim.Optimizer:
        """RMSprop or Adam, at 7e-4."""
        if self.use_rms_prop:
            return torch.optim.RMSprop(parameters, lr=7e-4, alpha=0.99, eps=self.rms_prop_eps, foreach=True)
        return torch.optim.Adam(parameters, lr=7e-4, eps=1e-5)
