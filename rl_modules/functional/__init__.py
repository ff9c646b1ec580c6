"""The mathematics of reinforcement learning as pure functions of tensors, one equation each."""

from rl_modules.functional.kl import approx_kl, kl_estimate
from rl_modules.functional.linalg import conjugate_gradient
from rl_modules.functional.policy import (
    adapt_kl_coefficient,
    clip_fraction,
    policy_gradient_loss,
    ppo_clip_loss,
    ppo_penalty_loss,
)
from rl_modules.functional.reductions import masked_mean, masked_whiten
from rl_modules.functional.returns import discounted_returns, gae, n_step_returns
from rl_modules.functional.value import dqn_target, explained_variance, td_loss, value_loss

__all__ = [
    "adapt_kl_coefficient",
    "approx_kl",
    "clip_fraction",
    "conjugate_gradient",
    "discounted_returns",
    "dqn_target",
    "explained_variance",
    "gae",
    "kl_estimate",
    "masked_mean",
    "masked_whiten",
    "n_step_returns",
    "policy_gradient_loss",
    "ppo_clip_loss",
    "ppo_penalty_loss",
    "td_loss",
    "value_loss",
]
