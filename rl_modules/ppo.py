"""Proximal policy optimization."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.actor_critic import ActorCriticModule, sample_or_mode
from rl_modules.base import OptimizerFactory, SchedulerFactory
from rl_modules.common.arguments import settings_of
from rl_modules.common.contract import MINIBATCHES, Rollout, RolloutSource
from rl_modules.common.errors import UsageError
from rl_modules.common.import_path import Custom
from rl_modules.common.schedules import parse_schedule, schedule_value
from rl_modules.distributions import Distribution, distribution_from

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

    Args:
        gamma: discount γ per transition, in [0, 1].
        gae_lambda: λ of generalized advantage estimation, in [0, 1].
        clip_range: ε, how far the ratio may move from 1; a number or a schedule, as for ``learning_rate``.
        clip_range_vf: the same for the value, in units of return; None: no value clipping.
        normalize_advantage: whiten advantages within each minibatch, over all ranks.
        ent_coef: weight of the entropy bonus, in units of advantage per nat; a number or a schedule.
        vf_coef: weight of the mean squared value error.
        max_grad_norm: global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None:
            no clipping.
        target_kl: in nats. ``clip``: stop updating on a rollout once approx_kl exceeds 1.5 × this; None: never.
            ``penalty``: target of the KL in every rollout; None: 0.01.
        policy_objective: ``clip`` or ``penalty``.
        kl_coef: initial β, > 0, in units of advantage per nat; for ``penalty`` only.
        net_arch: hidden widths of policy and value towers, or ``{"pi": [...], "vf": [...]}``; None: [64, 64], and none
            after a convolutional encoder.
        activation_fn: tanh, relu, elu, silu, gelu or leaky_relu.
        log_std_init: initial log standard deviation of Box actions.
        ortho_init: orthogonal initialisation with gains √2, 0.01 (policy head) and 1 (value head).
        learning_rate: a number, ``lin_<number>`` or ``cosine_<number>`` for a decay to 0, points such as
            ``0:3e-4, 1:0``, or None for the optimizer's own (Adam: 3e-4).
        optimizer: callable from parameters to an optimizer; None: Adam with eps 1e-5.
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

    experience = MINIBATCHES
    prepares_by = ("policy_objective",)

    def __init__(
        self,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | str = 0.2,
        clip_range_vf: float | str | None = None,
        normalize_advantage: bool = True,
        ent_coef: float | str = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float | None = 0.5,
        target_kl: float | None = None,
        policy_objective: str = "clip",
        kl_coef: float = 1.0,
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
        self.clip_schedule = parse_schedule(clip_range, "clip_range")
        self.clip_range = max(self.clip_schedule.initial, LEAST_CLIP_RANGE)
        self.clip_vf_schedule = None if clip_range_vf is None else parse_schedule(clip_range_vf, "clip_range_vf")
        self.clip_range_vf: float | None = None
        if self.clip_vf_schedule is not None:
            self.clip_range_vf = max(self.clip_vf_schedule.initial, LEAST_CLIP_RANGE)
        self.ent_schedule = parse_schedule(ent_coef, "ent_coef")
        self.ent_coef = self.ent_schedule.initial
        self.vf_coef = float(vf_coef)
        if policy_objective not in ("clip", "penalty"):
            raise UsageError(f"policy_objective={policy_objective!r} must be clip or penalty")
        for name, positive in (("kl_coef", kl_coef), ("target_kl", target_kl)):
            if positive is not None and not positive > 0:
                raise UsageError(f"{name}={positive} must be positive")
        self.penalizes = policy_objective == "penalty"
        if self.penalizes and target_kl == math.inf:
            raise UsageError("target_kl=inf must be finite with policy_objective=penalty, which keeps the KL near it")
        #: In nats; infinity: no early stop. It may be set between two updates.
        self.target_kl = target_kl if target_kl is not None else 0.01 if self.penalizes else math.inf
        self.kl_coef = float(kl_coef)
        self.kl_exceeded = False
        # Transitions so far when β was last set.
        self._adapted_at = 0

    @property
    def stops_early(self) -> bool:
        """Whether the updates on a rollout end once the policy has moved by more than 1.5 × ``target_kl``."""
        return self.target_kl < math.inf and not self.penalizes

    def idle_arguments(self) -> dict[str, str]:
        name, other = ("clip_range", "clip") if self.penalizes else ("kl_coef", "penalty")
        why = f"with policy_objective={self.hparams.get('policy_objective', 'clip')}; set that to {other}"
        return {**super().idle_arguments(), name: why}

    def begin_run(self) -> None:
        super().begin_run()
        self.kl_coef = float(self.hparams["kl_coef"])
        self.kl_exceeded = False
        self._approx_kl: Tensor | None = None
        self._adapted_at = 0

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns actions, their log-probabilities and the values of the states, each [N]."""
        policy, value = self.policy_and_value(observation)
        action = sample_or_mode(policy, generator, deterministic)
        acted = {"action": action, "log_prob": policy.log_prob(action), "value": value}
        return {**acted, "policy_parameters": policy.parameters()} if self.penalizes else acted

    def prepare(self, rollout: Rollout) -> dict[str, Any]:
        """Computes advantages and returns of a rollout, whose fields are those of
        :class:`~rl_modules.common.contract.Rollout`.

        Returns:
            The fields that :meth:`training_step` reads: observation, action, log_prob, value, advantage, returns, and
            with the penalty policy_parameters.
        """
        advantage = self.advantages(rollout)
        returns = advantage + rollout["value"]
        self.kl_exceeded = False
        self.record_explained_variance(rollout["value"], returns, rollout["valid"])
        names = ["observation", "action", "log_prob", "value", *(["policy_parameters"] if self.penalizes else [])]
        kept = {name: rollout[name] for name in names}  # type: ignore[literal-required]
        return {**kept, "advantage": advantage, "returns": returns}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.kl_exceeded:
            return self.no_update()
        policy, value = self.policy_and_value(batch["observation"])
        return self.loss_within_kl(policy, value, batch)

    def loss_within_kl(self, policy: Distribution, value: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns :meth:`minibatch_loss`, and notes whether the policy has moved by more than ``target_kl`` allows."""
        self._approx_kl = None
        loss = self.minibatch_loss(policy, value, batch)
        if self.stops_early:
            if self._approx_kl is None:  # `minibatch_loss` is a subclass's
                log_prob = policy.log_prob(batch["action"]).detach()
                self._approx_kl = F.approx_kl(log_prob, batch["log_prob"])
            # Every rank must come to the same decision, or they would wait for each other for ever.
            approx_kl = self.trainer.strategy.reduce(self._approx_kl, reduce_op="mean")
            self.kl_exceeded = bool(approx_kl > 1.5 * self.target_kl)
        return loss

    def minibatch_loss(self, policy: Distribution, value: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns the loss of one minibatch under the current policy and values, a scalar."""
        log_prob = policy.log_prob(batch["action"])
        if self.penalizes:
            batch = {**batch, "kl": self.kl_from_old(policy, batch)}
        policy_loss = self.policy_loss(log_prob, batch)
        value_loss = self.value_loss(value, batch)
        loss = torch.add(policy_loss, value_loss, alpha=self.vf_coef)
        if self.ent_coef:
            loss = loss - self.ent_coef * policy.entropy().mean()
        if self.logs_this_epoch or self.stops_early:
            self._diagnose(policy_loss, value_loss, policy.entropy().mean(), loss, log_prob, batch)
        weight = self.rank_weight(len(log_prob))
        return loss if weight == 1.0 else loss * weight

    # ---------------------------------------------------------------- pieces to override

    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns the clipped surrogate (eq. 7) or the surrogate with KL penalty (eq. 8) as a loss, a scalar."""
        advantage = batch["advantage"]
        if self.normalize_advantage:
            advantage = self.whiten(advantage)
        if self.penalizes:
            return F.ppo_penalty_loss(log_prob, batch["log_prob"], advantage, batch["kl"], self.kl_coef)
        return F.ppo_clip_loss(log_prob, batch["log_prob"], advantage, self.clip_range)

    def value_loss(self, value: Tensor, batch: dict[str, Any]) -> Tensor:
        """Mean squared error to the returns, a scalar; twice the functional's half, so that vf_coef means SB3's."""
        return 2 * F.value_loss(value, batch["returns"], batch["value"], self.clip_range_vf)

    def update_schedules(self, progress_remaining: float) -> None:
        super().update_schedules(progress_remaining)
        if self.clip_schedule.decays:
            self.clip_range = max(schedule_value(self.clip_schedule, progress_remaining), LEAST_CLIP_RANGE)
        if self.clip_vf_schedule is not None and self.clip_vf_schedule.decays:
            self.clip_range_vf = max(schedule_value(self.clip_vf_schedule, progress_remaining), LEAST_CLIP_RANGE)
        if not self.penalizes:
            self.record_now(clip_range=self.clip_range)

    # ---------------------------------------------------------------- adaptive KL penalty

    def kl_from_old(self, policy: Distribution, batch: dict[str, Any]) -> Tensor:
        """Returns KL(π_old || π) in every state of the batch, in nats, [B]."""
        return distribution_from(self.action_space, batch["policy_parameters"]).kl(policy)

    @torch.no_grad()
    def adapt_penalty(self) -> None:
        """Updates β once after a rollout's last minibatch, from the KL between the policies before and after its
        updates.
        """
        source = cast(RolloutSource, self.source)
        if not self.penalizes or not source.rollout_is_used_up or self._adapted_at == source.num_timesteps:
            return
        self._adapted_at = source.num_timesteps
        with self.trainer.precision_plugin.forward_context():
            policy, _ = self.policy_and_value(source.rollout["observation"])
        # Every rank must come to the same β.
        per_state = self.kl_from_old(policy, source.rollout)
        kl = float(self.trainer.strategy.reduce(per_state.mean() * self.rank_weight(len(per_state)), reduce_op="mean"))
        self.record_now(kl_coef=self.kl_coef, kl=kl)
        self.kl_coef = F.adapt_kl_coefficient(self.kl_coef, kl, self.target_kl)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.adapt_penalty()

    # ---------------------------------------------------------------- early stop on KL

    def _diagnose(self, policy_loss: Tensor, value_loss: Tensor, entropy: Tensor, loss: Tensor, log_prob: Tensor,
                  batch: dict[str, Any]) -> None:  # fmt: skip
        approx_kl = F.approx_kl(log_prob.detach(), batch["log_prob"])
        metrics = {
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": -entropy,
            "loss": loss,
            "approx_kl": approx_kl,
        }
        if not self.penalizes:
            metrics["clip_fraction"] = F.clip_fraction(log_prob.detach(), batch["log_prob"], self.clip_range)
        self.record(**metrics)
        self._approx_kl = approx_kl

    def no_update(self) -> Tensor:
        """Returns a loss without effect after the early stop; :meth:`optimizer_step` skips its step."""
        return sum((p.sum() for p in self.parameters() if p.requires_grad),
                   torch.zeros((), dtype=torch.float32, device=self.device)) * 0.0  # fmt: skip

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Takes Lightning's optimizer step; skips it after the early stop at ``target_kl``."""
        if self.stops_early and optimizer_closure is not None:
            # The minibatch that exceeds target_kl must not cause a step, so its loss is computed before the decision.
            # Without a step there is nothing for a gradient scaler to update either.
            loss = optimizer_closure()
            if self.kl_exceeded:
                optimizer.zero_grad(set_to_none=True)
                return
            optimizer_closure = partial(_value, loss)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.is_fitting:
            # At the end of a minibatch callbacks, which may write a checkpoint, come before the module.
            self.adapt_penalty()
        super().on_save_checkpoint(checkpoint)
        checkpoint["adapted_at"] = self._adapted_at
        checkpoint["kl_exceeded"] = self.kl_exceeded
        checkpoint["kl_coef"] = self.kl_coef

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_exceeded = checkpoint["kl_exceeded"]
        self._adapted_at = checkpoint.get("adapted_at", 0)
        # A new value of the argument kl_coef overrides the checkpoint's β.
        given = self.hparams["kl_coef"]
        if settings_of(checkpoint).get("kl_coef", given) == given:
            self.kl_coef = checkpoint["kl_coef"]


def _value(loss: Any) -> Any:
    return loss
