"""Advantage actor-critic."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules import ranks
from rl_modules.actor_critic import ActorCriticModule
from rl_modules.contract import SHORT_ROLLOUTS, Minibatch, Rollout
from rl_modules.core.settings import setting
from rl_modules.distributions import Distribution


class A2C(ActorCriticModule):
    """Synchronous advantage actor-critic.

    Mnih et al. 2016, arXiv:1602.01783, with synchronous actors. For each rollout, one step on

        L = -E[A log π(a|s)] + vf_coef·E[(V - R)²] - ent_coef·E[H(π)],   R = A + V(s)

    With ``gae_lambda=1``, R is the n-step return of the paper: the rewards to the end of the rollout, then V. The
    names and defaults are Stable-Baselines3's. ``optimizer=rl_modules.optimizers.RMSpropTFLike`` is TensorFlow's
    RMSprop, whose small first steps help if A2C is unstable.

    By default the datamodule yields whole rollouts of five steps once each, and collects many per Lightning epoch.
    """

    experience = SHORT_ROLLOUTS

    use_rms_prop: bool = setting(
        default=True, says="RMSprop with α 0.99; false: Adam with eps 1e-5", idle=lambda m: beside_optimizer(m)
    )
    rms_prop_eps: float = setting(
        default=1e-5,
        says="RMSprop's eps",
        above=0,
        idle=lambda m: beside_optimizer(m) or (not m.use_rms_prop and "while use_rms_prop is false; set that to true"),
    )
    gae_lambda = 1.0  # n-step returns
    normalize_advantage = False

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns actions and the values of the states, each [N]."""
        policy, value = self.policy_and_value(observation)
        return {"action": policy.mode() if deterministic else policy.sample(generator), "value": value}

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Computes advantages and returns of a rollout, whose fields are those of
        :class:`~rl_modules.contract.Rollout`.
        """
        advantage = self.advantages(rollout)
        returns = advantage + rollout["value"]
        return Minibatch(
            observation=rollout["observation"],
            action=rollout["action"],
            value=rollout["value"],
            advantage=advantage,
            returns=returns,
        )

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        policy, value = self.policy_and_value(batch["observation"])
        return self.minibatch_loss(policy, value, batch)

    def minibatch_loss(self, policy: Distribution, value: Tensor, batch: Minibatch) -> Tensor:
        """Returns the loss of one rollout under the current policy and values, a scalar."""
        policy_loss = self.policy_loss(policy.log_prob(batch["action"]), batch)
        value_loss = self.value_loss(value, batch)
        loss = policy_loss + self.vf_coef * value_loss
        if self.ent_coef:
            loss = loss - self.ent_coef * policy.entropy().mean()
        # Diagnosing every one of these small updates would cost 5 % of the run; SB3 logs one in a hundred too.
        if self.run.logs_this_epoch and self._is_last_batch:
            explain = F.explained_variance if self.run.n_ranks == 1 else ranks.explained_variance
            self.record(
                policy_gradient_loss=policy_loss,
                value_loss=value_loss,
                entropy_loss=-policy.entropy().detach().mean(),
                loss=loss,
                explained_variance=explain(batch["value"], batch["returns"]),
            )
        return self.loss_over_ranks(loss, len(value))

    @property
    def _is_last_batch(self) -> bool:
        # `total_timesteps` may end the last epoch before Lightning's number of batches.
        return self.trainer.is_last_batch or self.trainer.should_stop

    def recording_key(self) -> tuple[Any, ...]:
        return (*super().recording_key(), self._is_last_batch)

    # ---------------------------------------------------------------- pieces to override

    def policy_loss(self, log_prob: Tensor, batch: Minibatch) -> Tensor:
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


def beside_optimizer(module: A2C) -> str | None:
    """The reason why an argument of the default optimizer is idle."""
    if module.optimizer_factory is None:
        return None
    return "beside optimizer, which has arguments of its own; set them there"
