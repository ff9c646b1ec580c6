"""REINFORCE, and the vanilla policy gradient, which replaces the return by an advantage."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.actor_critic import ActorCriticModule
from rl_modules.contract import WHOLE_ROLLOUTS, Minibatch, Rollout
from rl_modules.core.settings import changed, fixed, setting

PSI = ("return", "reward_to_go", "baseline", "advantage")


class REINFORCE(ActorCriticModule):
    """REINFORCE: the policy gradient with a choice of weights of the log-probabilities.

    Williams 1992; the choices are those of Schulman et al. 2016, arXiv:1506.02438, eq. 1. Per rollout, one step on

        L = -E[Ψ_t log π(a_t|s_t)] - ent_coef·E[H(π)]  (+ vf_coef·E[(V - R)²] where Ψ needs V)

        Ψ_t = G_0                           "return"        the whole episode's return
        Ψ_t = G_t                           "reward_to_go"  what came after the action: a_t can't change the past
        Ψ_t = G_t - V(s_t)                  "baseline"      less what was to be expected in s_t
        Ψ_t = Σ_k (γλ)^k δ_{t+k}            "advantage"     GAE; the vanilla policy gradient (VPG)

    A rollout has a fixed length and cuts the episodes that are still running. Dropping them would bias the gradient,
    because long episodes are the ones that are cut, and only failures would remain near the end of a rollout. Instead,
    a rollout is a finite task of its own. Without V ("return", "reward_to_go") rewards after the rollout or a time
    limit are ignored, and G_0 starts at the episode's first transition *in the rollout*: the gradient is unbiased for
    the reward earned within the rollout. Choose the datamodule's ``n_steps`` much larger than 1 / (1 - γ) or than the
    episodes' length. With V ("baseline", "advantage"), V estimates the later rewards, and rollouts can be short.

    The factor γ^t of the exact gradient of the discounted return is omitted, as is usual in practice, except by
    "return", whose G_0 contains it.
    """

    experience = WHOLE_ROLLOUTS

    psi: str = setting(
        default="reward_to_go",
        says="Ψ, the weight of log π: ``return``, ``reward_to_go``, ``baseline`` or ``advantage``",
        one_of=PSI,
    )
    gae_lambda: float = changed(
        idle=lambda m: None if m.psi == "advantage" else f"with psi={m.psi}; set that to advantage"
    )
    vf_coef: float = changed(
        idle=lambda m: (
            not m.has_critic and f"with psi={m.psi}, which needs no values; set that to baseline or advantage"
        )
    )
    normalize_advantage = False
    max_grad_norm = None
    use_sde, sde_sample_freq = fixed(False), fixed()

    @property
    def has_critic(self) -> bool:
        """Whether Ψ needs V."""
        return self.psi in ("baseline", "advantage")

    def build_network(self) -> None:
        self.network = self.make_network(critic=self.has_critic)

    def act(self, observation: Any, generator: torch.Generator | None = None, deterministic: bool = False) -> dict:
        """Returns actions and, with a critic, the values of the states, each [N]."""
        policy, value = self.policy_and_value(observation)
        action = policy.mode() if deterministic else policy.sample(generator)
        return {"action": action, "value": value} if self.has_critic else {"action": action}

    def prepare(self, rollout: Rollout) -> Minibatch:
        """Computes weights and, with a critic, returns; see :class:`~rl_modules.contract.Rollout`."""
        prepared: Minibatch = {"observation": rollout["observation"], "action": rollout["action"]}
        prepared["weight"] = self.weights(rollout)
        if self.has_critic:
            # Both differences have V(s) taken off; adding it gives the λ-return, or the reward-to-go.
            returns = prepared["returns"] = prepared["weight"] + rollout["value"]
            self.record_explained_variance(rollout["value"], returns, rollout["valid"])
        return prepared

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        policy, value = self.policy_and_value(batch["observation"])
        policy_loss = self.policy_loss(policy.log_prob(batch["action"]), batch)
        loss, metrics = policy_loss, {"policy_gradient_loss": policy_loss}
        if self.has_critic:
            metrics["value_loss"] = value_loss = self.value_loss(value, batch)
            loss = loss + self.vf_coef * value_loss
        if self.ent_coef:
            loss = loss - self.ent_coef * policy.entropy().mean()
        if self.run.logs_this_epoch:
            self.record(**metrics, entropy_loss=-policy.entropy().detach().mean(), loss=loss)
        return self.loss_over_ranks(loss, len(batch["weight"]))

    # ---------------------------------------------------------------- pieces to override

    def weights(self, rollout: Rollout) -> Tensor:
        """Returns Ψ of every transition, [T, N]."""
        reward, terminated, truncated = rollout["reward"], rollout["terminated"], rollout["truncated"]
        next_value = rollout["next_value"] if self.has_critic else torch.zeros_like(reward)
        if self.psi == "advantage":
            value = rollout["value"]
            return F.gae(reward, value, next_value, terminated, truncated, self.gamma, self.gae_lambda)
        reward_to_go = F.discounted_returns(reward, next_value, terminated, truncated, self.gamma)
        if self.psi == "baseline":
            return reward_to_go - rollout["value"]
        if self.psi == "return":
            return at_first_transition(reward_to_go, terminated | truncated, rollout["valid"])
        return reward_to_go

    def policy_loss(self, log_prob: Tensor, batch: Minibatch) -> Tensor:
        """Returns the policy gradient as a loss, a scalar."""
        weight = batch["weight"]
        if self.normalize_advantage:
            weight = self.whiten(weight)
        return F.policy_gradient_loss(log_prob, weight)


def at_first_transition(x: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
    """Returns, for every transition, the value of ``x`` at the first transition of its episode in the rollout."""
    time = torch.arange(len(x), device=x.device).unsqueeze(1).expand_as(x)
    begins = torch.ones_like(ended)
    begins[1:] = ended[:-1] | ~valid[:-1]
    first = torch.where(begins, time, 0).cummax(0).values
    return x.gather(0, first)
