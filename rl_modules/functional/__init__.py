"""The mathematics of reinforcement learning as pure functions of tensors, one equation each.

A function's file is imported when the function is first used: a program pays for the files it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "adapt_kl_coefficient": "rl_modules.functional.policy",
    "approx_kl": "rl_modules.functional.kl",
    "bradley_terry_loss": "rl_modules.functional.preferences",
    "categorical_projection": "rl_modules.functional.distributional",
    "clip_fraction": "rl_modules.functional.policy",
    "combine_rewards": "rl_modules.functional.groups",
    "conjugate_gradient": "rl_modules.functional.linalg",
    "cons_at_k": "rl_modules.functional.evaluation",
    "discounted_returns": "rl_modules.functional.returns",
    "dpo_loss": "rl_modules.functional.direct_preferences",
    "dqn_target": "rl_modules.functional.value",
    "explained_variance": "rl_modules.functional.value",
    "finite_horizon_evaluation": "rl_modules.functional.dynamic_programming",
    "finite_horizon_value_iteration": "rl_modules.functional.dynamic_programming",
    "gae": "rl_modules.functional.returns",
    "group_advantages": "rl_modules.functional.groups",
    "distillation_advantage": "rl_modules.functional.distillation",
    "generalized_jsd": "rl_modules.functional.distillation",
    "with_tail": "rl_modules.functional.distillation",
    "grpo_loss": "rl_modules.functional.grpo",
    "importance_weights": "rl_modules.functional.importance",
    "kl_estimate": "rl_modules.functional.kl",
    "kto_loss": "rl_modules.functional.direct_preferences",
    "masked_mean": "rl_modules.functional.reductions",
    "masked_whiten": "rl_modules.functional.reductions",
    "n_step_returns": "rl_modules.functional.returns",
    "n_step_rewards": "rl_modules.functional.returns",
    "odds_ratio_loss": "rl_modules.functional.direct_preferences",
    "pass_at_k": "rl_modules.functional.evaluation",
    "policy_evaluation": "rl_modules.functional.dynamic_programming",
    "policy_gradient_loss": "rl_modules.functional.policy",
    "ppo_clip_loss": "rl_modules.functional.policy",
    "ppo_penalty_loss": "rl_modules.functional.policy",
    "proportional_kl_coefficient": "rl_modules.functional.rlhf",
    "quantile_huber_loss": "rl_modules.functional.distributional",
    "rlhf_rewards": "rl_modules.functional.rlhf",
    "batch_advantages": "rl_modules.functional.groups",
    "rloo_advantages": "rl_modules.functional.groups",
    "simpo_loss": "rl_modules.functional.direct_preferences",
    "soft_overlong_punishment": "rl_modules.functional.lengths",
    "soft_q_target": "rl_modules.functional.maximum_entropy",
    "squashed_gaussian_log_prob": "rl_modules.functional.maximum_entropy",
    "td_loss": "rl_modules.functional.value",
    "token_entropy": "rl_modules.functional.tokens",
    "token_log_probs": "rl_modules.functional.tokens",
    "value_iteration": "rl_modules.functional.dynamic_programming",
    "value_loss": "rl_modules.functional.value",
}

__all__ = [
    "adapt_kl_coefficient",
    "approx_kl",
    "batch_advantages",
    "bradley_terry_loss",
    "categorical_projection",
    "clip_fraction",
    "combine_rewards",
    "conjugate_gradient",
    "cons_at_k",
    "discounted_returns",
    "distillation_advantage",
    "dpo_loss",
    "dqn_target",
    "explained_variance",
    "finite_horizon_evaluation",
    "finite_horizon_value_iteration",
    "gae",
    "generalized_jsd",
    "group_advantages",
    "grpo_loss",
    "importance_weights",
    "kl_estimate",
    "kto_loss",
    "masked_mean",
    "masked_whiten",
    "n_step_returns",
    "n_step_rewards",
    "odds_ratio_loss",
    "pass_at_k",
    "policy_evaluation",
    "policy_gradient_loss",
    "ppo_clip_loss",
    "ppo_penalty_loss",
    "proportional_kl_coefficient",
    "quantile_huber_loss",
    "rlhf_rewards",
    "rloo_advantages",
    "simpo_loss",
    "soft_overlong_punishment",
    "soft_q_target",
    "squashed_gaussian_log_prob",
    "td_loss",
    "token_entropy",
    "token_log_probs",
    "value_iteration",
    "value_loss",
    "with_tail",
]

if TYPE_CHECKING:
    from rl_modules.functional.direct_preferences import dpo_loss, kto_loss, odds_ratio_loss, simpo_loss
    from rl_modules.functional.distillation import distillation_advantage, generalized_jsd, with_tail
    from rl_modules.functional.distributional import categorical_projection, quantile_huber_loss
    from rl_modules.functional.dynamic_programming import (
        finite_horizon_evaluation,
        finite_horizon_value_iteration,
        policy_evaluation,
        value_iteration,
    )
    from rl_modules.functional.evaluation import cons_at_k, pass_at_k
    from rl_modules.functional.groups import batch_advantages, combine_rewards, group_advantages, rloo_advantages
    from rl_modules.functional.grpo import grpo_loss
    from rl_modules.functional.importance import importance_weights
    from rl_modules.functional.kl import approx_kl, kl_estimate
    from rl_modules.functional.lengths import soft_overlong_punishment
    from rl_modules.functional.linalg import conjugate_gradient
    from rl_modules.functional.maximum_entropy import soft_q_target, squashed_gaussian_log_prob
    from rl_modules.functional.policy import (
        adapt_kl_coefficient,
        clip_fraction,
        policy_gradient_loss,
        ppo_clip_loss,
        ppo_penalty_loss,
    )
    from rl_modules.functional.preferences import bradley_terry_loss
    from rl_modules.functional.reductions import masked_mean, masked_whiten
    from rl_modules.functional.returns import discounted_returns, gae, n_step_returns, n_step_rewards
    from rl_modules.functional.rlhf import proportional_kl_coefficient, rlhf_rewards
    from rl_modules.functional.tokens import token_entropy, token_log_probs
    from rl_modules.functional.value import dqn_target, explained_variance, td_loss, value_loss


def __getattr__(name: str) -> Any:
    """Imports an exported function and keeps it as an attribute, so that later uses do not come here again."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = globals()[name] = getattr(import_module(_EXPORTS[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
