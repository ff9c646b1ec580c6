"""Base class of PPO, A2C, REINFORCE and TRPO: the network, γ and λ, advantages, the value loss."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rl_modules import functional as F
from rl_modules import ranks
from rl_modules.base import ControlModule, beside_network, sde_sample_freq, use_sde
from rl_modules.common.masks import split_mask
from rl_modules.common.schedules import Rate
from rl_modules.contract import Minibatch, Rollout
from rl_modules.core.settings import Scheduled, setting
from rl_modules.distributions import Distribution, as_distribution
from rl_modules.networks.actor_critic import ActorCritic
from rl_modules.networks.custom import CustomActorCritic
from rl_modules.networks.layers import check_widths


def outside_box(module: "ActorCriticModule") -> str | None:
    """The reason why an argument of real actions is idle."""
    if isinstance(module.action_space, spaces.Box):
        return None
    return f"in the action space {module.action_space}; use it with a Box"


class ActorCriticModule(ControlModule):
    """Base class of the policy-gradient algorithms."""

    gamma: float = setting(default=0.99, says="discount γ per transition", least=0, most=1)
    gae_lambda: float = setting(default=0.95, says="λ of generalized advantage estimation", least=0, most=1)
    normalize_advantage: bool = setting(default=True, says="whiten advantages within each minibatch, over all ranks")
    ent_coef: Scheduled[Rate, float] = setting(
        default=0.0,
        says="weight of the entropy bonus, in units of advantage per nat; a number or a schedule",
    )
    vf_coef: float = setting(default=0.5, says="weight of the mean squared value error", least=0)
    max_grad_norm: float | None = setting(
        default=0.5,
        says="global norm to clip gradients to, used where the Trainer sets no ``gradient_clip_val``; None: no "
        "clipping",
        above=0,
    )
    net_arch: list[int] | dict[str, list[int]] | None = setting(
        default=None,
        says='hidden widths of policy and value towers, or ``{"pi": [...], "vf": [...]}``; None: [64, 64], and none '
        "after a convolutional encoder",
        check=check_widths,
        idle=beside_network,
    )
    activation_fn: str = setting(default="tanh", says="tanh, relu, elu, silu, gelu or leaky_relu", idle=beside_network)
    log_std_init: float = setting(
        default=0.0,
        says="initial log standard deviation of Box actions",
        idle=lambda m: beside_network(m) or outside_box(m),
    )
    ortho_init: bool = setting(
        default=True,
        says="orthogonal initialisation with gains √2, 0.01 (policy head) and 1 (value head)",
        idle=beside_network,
    )

    use_sde: bool = use_sde()
    sde_sample_freq: int = sde_sample_freq()

    def build_network(self) -> None:
        self.network = self.make_network()

    def make_network(self, critic: bool = True) -> ActorCritic:
        """Builds policy and value function from the hyperparameters; without ``critic`` only the policy."""
        if self.own_network is not None:
            custom: Any = CustomActorCritic(self.own_network, self.observation_space, self.action_space, critic)
            return custom
        return ActorCritic(
            self.observation_space,
            self.action_space,
            self.net_arch,
            self.activation_fn,
            self.log_std_init,
            self.ortho_init,
            critic,
            self.use_sde,
        )

    def policy_and_value(self, observation: Any) -> tuple[Distribution, Tensor]:
        """Returns π(·|s) and V(s), [B]; an observation's ``action_mask`` restricts the one, and no network reads it."""
        mask = None
        if isinstance(observation, dict):
            observation, mask = split_mask(observation)
        policy, value = self.network(observation)
        if isinstance(policy, torch.distributions.Distribution):
            policy = as_distribution(policy)
        if self.run.noise_matrices is not None and hasattr(policy, "matrices"):
            policy.matrices = self.run.noise_matrices
        return (policy if mask is None else policy.masked(mask)), value

    # ---------------------------------------------------------------- pieces to override

    def advantages(self, rollout: Rollout) -> Tensor:
        """Returns A(s, a) of every transition, [T, N]: GAE(γ, λ)."""
        return F.gae(
            rollout["reward"],
            rollout["value"],
            rollout["next_value"],
            rollout["terminated"],
            rollout["truncated"],
            self.gamma,
            self.gae_lambda,
        )

    def value_loss(self, value: Tensor, batch: Minibatch) -> Tensor:
        """Returns the mean squared error to the returns, twice the functional's half, so that vf_coef is SB3's."""
        return 2 * F.value_loss(value, batch["returns"])

    # ---------------------------------------------------------------- over ranks

    def whiten(self, x: Tensor) -> Tensor:
        """``(x - mean) / (std + 1e-8)`` over all ranks, which call it together, [B]."""
        if self.run.n_ranks == 1:
            if len(x) < 2:
                return x
            std, mean = torch.std_mean(x)
        else:
            std, mean = ranks.std_mean(x)
        return (x - mean) / (std + 1e-8)

    def record_explained_variance(self, value: Tensor, returns: Tensor, valid: Tensor) -> None:
        """Records how much of the returns' variance the critic explained before the update; arguments [T, N]."""
        if self.run.logs_this_epoch:
            if self.run.has_resets:
                value, returns = value[valid], returns[valid]
            explain = F.explained_variance if self.run.n_ranks == 1 else ranks.explained_variance
            self.record_now(explained_variance=explain(value, returns))
