"""Proximal policy optimization."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.actor_critic import ActorCriticModule
from rl_modules.common.schedules import OptionalRate, Rate
from rl_modules.contract import MINIBATCHES, Minibatch, Rollout
from rl_modules.core.resume import uncount_step
from rl_modules.core.settings import Converted, Scheduled, setting
from rl_modules.core.state import persistent
from rl_modules.distributions import Distribution, distribution_from

#: Fields of a rollout that minibatches need.
STORED = ("observation", "action", "log_prob", "value", "policy_parameters")
#: Smallest ε of a linear schedule, for the last rollout: ε = 0 would allow no update.
LEAST_CLIP_RANGE = 1e-8


class PPO(ActorCriticModule):
    """Proximal policy optimization, with the clipped objective or the adaptive KL penalty.

    Schulman et al. 2017, arXiv:1707.06347. Per rollout: advantages by GAE, then several epochs of minibatches on

        L = L_π + vf_coef·E[(V - R)²] - ent_coef·E[H(π)],   ρ = π(a|s) / π_old(a|s)

        L_π = -E[min(ρA, clip(ρ, 1-ε, 1+ε)A)]     "clip"
        L_π = -E[ρA] + β·E[KL(π_old || π)]         "penalty"

    β starts at ``kl_coef``. After a rollout's last minibatch the mean KL over the rollout is computed, and β is halved
    if it is below ``target_kl / 1.5`` and doubled if it is above ``1.5 · target_kl``. The KL is exact, not estimated
    from sampled actions: each transition stores the parameters of π_old.

    The names and defaults are Stable-Baselines3's. Departures from it: ``learning_rate`` defaults to the optimizer's;
    with ``clip_range_vf`` the value loss is the larger of the clipped and the unclipped squared error, as in OpenAI
    Baselines and CleanRL, where Stable-Baselines3 takes the clipped one alone; and after the early stop at
    ``target_kl`` the rollout's remaining minibatches are skipped without shortening the epoch, whose length Lightning's
    validation and schedulers rely on.
    """

    experience = MINIBATCHES
    shapes_batch = ("policy_objective",)

    clip_range: Scheduled[Rate, float] = setting(
        default=0.2,
        says="ε, how far the ratio may move from 1; a number or a schedule, as for ``learning_rate``",
        least=LEAST_CLIP_RANGE,
        idle=lambda m: m.penalizes and "with policy_objective=penalty; set that to clip",
    )
    clip_range_vf: Scheduled[OptionalRate, float | None] = setting(
        default=None,
        says="the same for the value, in units of return; None: no value clipping",
        least=LEAST_CLIP_RANGE,
    )
    target_kl: Converted[float | None, float] = setting(
        default=None,
        says="in nats. ``clip``: stop updating on a rollout once approx_kl exceeds 1.5 × this; None: never. "
        "``penalty``: target of the KL in every rollout; None: 0.01",
        above=0,
    )
    policy_objective: str = setting(default="clip", says="``clip`` or ``penalty``", one_of=("clip", "penalty"))
    kl_coef: float = setting(
        default=1.0,
        says="initial β, in units of advantage per nat; for ``penalty`` only",
        above=0,
        idle=lambda m: not m.penalizes and "with policy_objective=clip; set that to penalty",
    )

    #: β, the coefficient of the KL penalty.
    beta: float = persistent(lambda m: m.kl_coef, argument="kl_coef")
    #: Whether the updates on this rollout have ended.
    kl_exceeded: bool = persistent(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Whether the objective has the adaptive KL penalty instead of clipping.
        self.penalizes = self.policy_objective == "penalty"
        if self.target_kl is None:
            self.target_kl = 0.01 if self.penalizes else math.inf

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns actions, their log-probabilities and the values of the states, each [N]."""
        policy, value = self.policy_and_value(observation)
        action = policy.mode() if deterministic else policy.sample(generator)
        acted = {"action": action, "log_prob": policy.log_prob(action), "value": value}
        return {**acted, "policy_parameters": policy.parameters()} if self.penalizes else acted

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Computes advantages and returns of a rollout."""
        advantage = self.advantages(rollout)
        returns = advantage + rollout["value"]
        self.kl_exceeded = False
        self.record_explained_variance(rollout["value"], returns, rollout["valid"])
        kept: Any = {name: rollout[name] for name in STORED if name in rollout}  # type: ignore[literal-required]
        return {**kept, "advantage": advantage, "returns": returns}

    # ---------------------------------------------------------------- one minibatch

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        if self.kl_exceeded:
            return self.no_update()
        policy, value = self.policy_and_value(batch["observation"])
        return self.loss_within_kl(policy, value, batch)

    def loss_within_kl(self, policy: Distribution, value: Tensor, batch: Minibatch) -> Tensor:
        """Returns :meth:`minibatch_loss`, and notes whether the policy has moved by more than ``target_kl`` allows."""
        if self.target_kl < math.inf and not self.penalizes:
            approx_kl = F.approx_kl(policy.log_prob(batch["action"]).detach(), batch["log_prob"])
            # Every rank must come to the same decision, or they would wait for each other for ever.
            self.kl_exceeded = bool(self.mean_over_ranks(approx_kl) > 1.5 * self.target_kl)
        return self.minibatch_loss(policy, value, batch)

    def minibatch_loss(self, policy: Distribution, value: Tensor, batch: Minibatch) -> Tensor:
        """Returns the loss of one minibatch under the current policy and values, a scalar."""
        log_prob = policy.log_prob(batch["action"])
        if self.penalizes:
            batch = {**batch, "kl": self.kl_from_old(policy, batch)}
        policy_loss = self.policy_loss(log_prob, batch)
        value_loss = self.value_loss(value, batch)
        loss = torch.add(policy_loss, value_loss, alpha=self.vf_coef)
        if self.ent_coef:
            loss = loss - self.ent_coef * policy.entropy().mean()
        if self.run.logs_this_epoch:
            ratio = log_prob.detach(), batch["log_prob"]
            clipped = {} if self.penalizes else {"clip_fraction": F.clip_fraction(*ratio, self.clip_range)}
            self.record(
                policy_gradient_loss=policy_loss,
                value_loss=value_loss,
                entropy_loss=-policy.entropy().mean(),
                loss=loss,
                approx_kl=F.approx_kl(*ratio),
                **clipped,
            )
        return self.loss_over_ranks(loss, len(log_prob))

    def policy_loss(self, log_prob: Tensor, batch: Minibatch) -> Tensor:
        """Returns the clipped surrogate (eq. 7) or the surrogate with KL penalty (eq. 8) as a loss, a scalar."""
        advantage = self.whiten(batch["advantage"]) if self.normalize_advantage else batch["advantage"]
        if self.penalizes:
            return F.ppo_penalty_loss(log_prob, batch["log_prob"], advantage, batch["kl"], self.beta)
        return F.ppo_clip_loss(log_prob, batch["log_prob"], advantage, self.clip_range)

    def value_loss(self, value: Tensor, batch: Minibatch) -> Tensor:
        """Mean squared error to the returns, a scalar; twice the functional's half, so that vf_coef means SB3's."""
        return 2 * F.value_loss(value, batch["returns"], batch["value"], self.clip_range_vf)

    def update_schedules(self, progress_remaining: float) -> None:
        """Sets scheduled values and records the clip range, also where a run resumes with another one."""
        super().update_schedules(progress_remaining)
        if not self.penalizes:
            self.record_now(clip_range=self.clip_range)

    # ---------------------------------------------------------------- adaptive KL penalty

    def kl_from_old(self, policy: Distribution, batch: Minibatch) -> Tensor:
        """Returns KL(π_old || π) in every state of the batch, in nats, [B]."""
        return distribution_from(self.action_space, batch["policy_parameters"]).kl(policy)

    @torch.no_grad()
    def end_rollout(self, rollout: Minibatch) -> None:
        """Adapts β to the KL between the policies before and after the updates on a rollout."""
        if not self.penalizes:
            return
        with self.trainer.precision_plugin.forward_context():
            policy, _ = self.policy_and_value(rollout["observation"])
        kl = self.kl_from_old(policy, rollout)
        mean = float(self.mean_over_ranks(self.loss_over_ranks(kl.mean(), len(kl))))  # every rank comes to the same β
        self.record_now(kl_coef=self.beta, kl=mean)
        self.beta = F.adapt_kl_coefficient(self.beta, mean, self.target_kl)

    # ---------------------------------------------------------------- early stop at target_kl

    def no_update(self) -> Tensor:
        """Returns a loss without effect; :meth:`optimizer_step` skips its step."""
        nothing = torch.zeros((), dtype=torch.float32, device=self.device)
        return 0.0 * sum((p.sum() for p in self.parameters() if p.requires_grad), nothing)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Takes Lightning's optimizer step; skips it after the early stop at ``target_kl``."""
        if self.target_kl < math.inf and not self.penalizes and optimizer_closure is not None:
            # The minibatch that exceeds target_kl must not cause a step, so its loss is computed before the decision.
            # Without a step there is nothing for a gradient scaler to update either.
            loss = optimizer_closure()
            if self.kl_exceeded:
                optimizer.zero_grad(set_to_none=True)
                uncount_step(self.trainer)
            else:
                super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
            return
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
