"""TensorBoard's custom scalars: the four curves that matter for an algorithm on one page."""

import re
from typing import Any

_EVALUATION = ["eval/mean_reward", "eval/std_reward"]
_RETURN = {"return": ["rollout/ep_rew_mean"], "evaluation": _EVALUATION}
_POLICY = {**_RETURN, "entropy": ["train/entropy_loss"], "value": ["train/explained_variance", "train/value_loss"]}

#: Charts by algorithm: title, and the tags that are drawn in it.
CHARTS: dict[str, dict[str, list[str]]] = {
    "PPO": {
        **_RETURN,
        "how far the policy moves": ["train/approx_kl", "train/clip_fraction"],
        "explained variance": ["train/explained_variance"],
    },
    "A2C": _POLICY,
    "REINFORCE": {**_RETURN, "entropy": ["train/entropy_loss"], "policy loss": ["train/policy_gradient_loss"]},
    "TRPO": {
        **_RETURN,
        "KL of the step": ["train/approx_kl"],
        "explained variance": ["train/explained_variance"],
    },
    "DQN": {**_RETURN, "loss": ["train/loss"], "exploration": ["rollout/exploration_rate"]},
    "SFT": {
        "loss": ["train/loss", "eval/loss"],
        "correct": ["eval/pass@1"],
        "accuracy of tokens": ["train/mean_token_accuracy"],
        "learning rate": ["train/learning_rate"],
    },
    "RewardModel": {
        "accuracy": ["train/accuracy", "eval/accuracy"],
        "loss": ["train/loss", "eval/loss"],
        "margin": ["train/margin"],
        "learning rate": ["train/learning_rate"],
    },
    "DPO": {
        "accuracy": ["train/rewards/accuracies", "eval/rewards/accuracies"],
        "margin": ["train/rewards/margins"],
        "loss": ["train/loss", "eval/loss"],
        "log-probabilities": ["train/logps/chosen", "train/logps/rejected"],
    },
    "KTO": {
        "margin": ["train/rewards/margins", "eval/rewards/margins"],
        "KL": ["train/kl"],
        "loss": ["train/loss", "eval/loss"],
        "log-probabilities": ["train/logps/chosen", "train/logps/rejected"],
    },
    "GRPO": {
        "reward": ["train/reward"],
        "correct": ["eval/pass@1"],
        "entropy and KL": ["train/entropy", "train/kl"],
        "length": ["train/completions/mean_length", "train/completions/max_length"],
    },
    "RLHFPPO": {
        "score": ["train/objective/scores", "eval/scores"],
        "KL": ["train/objective/kl", "eval/kl"],
        "entropy": ["train/objective/entropy"],
        "length": ["train/completions/mean_length"],
    },
}
#: Charts of control algorithms without specific charts.
_CONTROL = {**_RETURN, "length of episodes": ["rollout/ep_len_mean"], "speed": ["time/fps"]}


def layout_of(module: Any) -> dict[str, dict[str, list[Any]]]:
    """Returns the layout for ``SummaryWriter.add_custom_scalars``."""
    names = [cls.__name__ for cls in type(module).__mro__]
    charts = next((CHARTS[name] for name in names if name in CHARTS), _CONTROL)
    # TensorBoard reads tags as regular expressions.
    return {
        type(module).__name__: {
            title: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]] for title, tags in charts.items()
        }
    }
