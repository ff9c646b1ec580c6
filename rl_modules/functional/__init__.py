"""The mathematics of reinforcement learning as pure functions of tensors, one equation each."""

from rl_modules.functional.dynamic_programming import (
    finite_horizon_evaluation,
    finite_horizon_value_iteration,
    policy_evaluation,
    value_iteration,
)
from rl_modules.functional.evaluation import cons_at_k, pass_at_k
from rl_modules.functional.groups import combine_rewards, group_advantages
from rl_modules.functional.grpo import grpo_loss
from rl_modules.functional.kl import approx_kl, kl_estimate
from rl_modules.functional.linalg import conjugate_gradient
from rl_modules.functional.policy import (
    adapt_kl_coefficient,
    clip_fraction,
    policy_gradient_loss,
    ppo_clip_loss,
    ppo_penalty_loss,
)
from rl_modules.functional.preferences import bradley_terry_loss
from rl_modules.functional.reductions import masked_mean, masked_whiten
from rl_modules.functional.returns import discounted_returns, gae, n_step_returns
from rl_modules.functional.rlhf import proportional_kl_coefficient, rlhf_rewards
from rl_modules.functional.tokens import token_entropy, token_log_probs
from rl_modules.functional.value import dqn_target, explained_variance, td_loss, value_loss

__all__ = [
    "adapt_kl_coefficient",
    "approx_kl",
    "bradley_terry_loss",
    "clip_fraction",
    "combine_rewards",
    "conjugate_gradient",
    "cons_at_k",
    "discounted_returns",
    "dqn_target",
    "explained_variance",
    "finite_horizon_evaluation",
    "finite_horizon_value_iteration",
    "gae",
    "group_advantages",
    "grpo_loss",
    "kl_estimate",
    "masked_mean",
    "masked_whiten",
    "n_step_returns",
    "pass_at_k",
    "policy_evaluation",
    "policy_gradient_loss",
    "ppo_clip_loss",
    "ppo_penalty_loss",
    "proportional_kl_coefficient",
    "rlhf_rewards",
    "td_loss",
    "token_entropy",
    "token_log_probs",
    "value_iteration",
    "value_loss",
]
