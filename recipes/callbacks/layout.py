"""TensorBoard's custom scalars: the four curves that matter for an algorithm on one page."""

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
        "loss": ["loss", "eval/loss"],
        "correct": ["eval/pass@1"],
        "accuracy of tokens": ["mean_token_accuracy"],
        "learning rate": ["learning_rate"],
    },
    "RewardModel": {
        "accuracy": ["accuracy", "eval/accuracy"],
        "loss": ["loss", "eval/loss"],
        "margin": ["margin"],
        "learning rate": ["learning_rate"],
    },
    "DPO": {
        "accuracy": ["rewards/accuracies", "eval/rewards/accuracies"],
        "margin": ["rewards/margins"],
        "loss": ["loss", "eval/loss"],
        "log-probabilities": ["logps/chosen", "logps/rejected"],
    },
    "GRPO": {
        "reward": ["reward"],
        "correct": ["eval/pass@1", "eval/pass@k"],
        "entropy and KL": ["entropy", "kl"],
        "length": ["completions/mean_length", "completions/max_length"],
    },
    "RLHFPPO": {
        "score": ["objective/scores", "eval/scores"],
        "KL": ["objective/kl", "eval/kl"],
        "entropy": ["objective/entropy"],
        "length": ["completions/mean_length"],
    },
}
#: What algorithms of control without charts of their own get.
_CONTROL = {**_RETURN, "length of episodes": ["rollout/ep_len_mean"], "speed": ["time/fps"]}


def layout_of(module: Any) -> dict[str, dict[str, list[Any]]]:
    """The layout for ``SummaryWriter.add_custom_scalars``.

    Args:
        module: the algorithm; a subclass gets its base's charts.

    Returns:
        Charts of several curves by title, below the algorithm's name.
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    charts = next((CHARTS[name] for name in names if name in CHARTS), _CONTROL)
    # Language curves are tagged with and without the prefix of their group.
    return {type(module).__name__: {title: ["Multiline", _patterns(tags)] for title, tags in charts.items()}}


def _patterns(tags: list[str]) -> list[str]:
    """TensorBoard reads tags as regular expressions; a language metric may stand below ``train/``."""
    return [
        f"^(train/)?{tag}$" if not tag.startswith(("eval/", "rollout/", "time/", "train/")) else f"^{tag}$"
        for tag in tags
    ]
