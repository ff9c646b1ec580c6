"""The mathematics of reinforcement learning as pure functions of tensors, one equation each.

A function's file is imported when the function is first used: a program pays for the files it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

#: Names by the file that has them.
_MODULES = {
    "advantages": ["gae"],
    "direct_preferences": ["dpo_loss", "kto_loss", "odds_ratio_loss", "simpo_loss"],
    "distillation": ["distillation_advantage", "generalized_jsd", "with_tail"],
    "distributional": ["categorical_projection", "quantile_huber_loss"],
    "dynamic_programming": [
        "finite_horizon_evaluation",
        "finite_horizon_value_iteration",
        "policy_evaluation",
        "value_iteration",
    ],
    "evaluation": ["cons_at_k", "pass_at_k"],
    "groups": ["batch_advantages", "combine_rewards", "gdpo_advantages", "group_advantages", "rloo_advantages"],
    "grpo": ["grpo_loss"],
    "importance": ["importance_weights"],
    "kl": ["kl_estimate"],
    "linalg": ["conjugate_gradient"],
    "maximum_entropy": ["soft_q_target", "soft_value", "squashed_gaussian_log_prob"],
    "kl_penalty": ["adapt_kl_coefficient", "ppo_penalty_loss"],
    "policy": ["approx_kl", "clip_fraction", "policy_gradient_loss", "ppo_clip_loss"],
    "random_search": ["random_search_direction"],
    "reductions": ["masked_mean", "masked_whiten"],
    "returns": ["discounted_returns", "n_step_returns"],
    "rlhf": ["bradley_terry_loss", "proportional_kl_coefficient", "rlhf_rewards", "soft_overlong_punishment"],
    "tokens": ["token_entropy", "token_log_probs"],
    "td": ["dqn_target", "n_step_rewards", "td_loss"],
    "value": ["explained_variance", "value_loss"],
}
_EXPORTS = {name: f"rl_modules.functional.{module}" for module, names in _MODULES.items() for name in names}

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
    "gdpo_advantages",
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
    "random_search_direction",
    "rlhf_rewards",
    "rloo_advantages",
    "simpo_loss",
    "soft_overlong_punishment",
    "soft_q_target",
    "soft_value",
    "squashed_gaussian_log_prob",
    "td_loss",
    "token_entropy",
    "token_log_probs",
    "value_iteration",
    "value_loss",
    "with_tail",
]

if TYPE_CHECKING:
    from rl_modules.functional.advantages import gae
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
    from rl_modules.functional.groups import (
        batch_advantages,
        combine_rewards,
        gdpo_advantages,
        group_advantages,
        rloo_advantages,
    )
    from rl_modules.functional.grpo import grpo_loss
    from rl_modules.functional.importance import importance_weights
    from rl_modules.functional.kl import kl_estimate
    from rl_modules.functional.kl_penalty import adapt_kl_coefficient, ppo_penalty_loss
    from rl_modules.functional.linalg import conjugate_gradient
    from rl_modules.functional.maximum_entropy import soft_q_target, soft_value, squashed_gaussian_log_prob
    from rl_modules.functional.policy import approx_kl, clip_fraction, policy_gradient_loss, ppo_clip_loss
    from rl_modules.functional.random_search import random_search_direction
    from rl_modules.functional.reductions import masked_mean, masked_whiten
    from rl_modules.functional.returns import discounted_returns, n_step_returns
    from rl_modules.functional.rlhf import (
        bradley_terry_loss,
        proportional_kl_coefficient,
        rlhf_rewards,
        soft_overlong_punishment,
    )
    from rl_modules.functional.td import dqn_target, n_step_rewards, td_loss
    from rl_modules.functional.tokens import token_entropy, token_log_probs
    from rl_modules.functional.value import explained_variance, value_loss


def __getattr__(name: str) -> Any:
    """Imports an exported function and keeps it as an attribute, so that later uses do not come here again."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = globals()[name] = getattr(import_module(_EXPORTS[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
