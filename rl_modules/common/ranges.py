"""The values that hyperparameters may have, by name: checked in one place for every algorithm and datamodule."""

import math
from collections.abc import MutableMapping
from typing import Any

from rl_modules.common.calls import declared_here
from rl_modules.common.errors import UsageError

#: Least and largest value of a number; ``None`` itself is allowed where ``OPTIONAL`` names the argument.
_INF = math.inf
CLOSED = {
    "gamma": (0, 1), "gae_lambda": (0, 1), "lam": (0, 1), "norm_gamma": (0, 1), "exploration_fraction": (0, 1),
    "exploration_initial_eps": (0, 1), "exploration_final_eps": (0, 1), "label_smoothing": (0, 1),
    "min_p": (0, 1),
    "ent_coef": (-_INF, _INF), "vf_coef": (0, _INF), "beta": (0, _INF), "log_std_init": (-_INF, _INF),
    "initial_value": (-_INF, _INF), "cg_damping": (0, _INF), "ptx_coef": (0, _INF), "weight_decay": (0, _INF),
    "epsilon": (0, _INF), "epsilon_high": (0, _INF), "repetition_penalty": (0, _INF),
    "prioritized_replay_alpha": (0, _INF), "prioritized_replay_beta0": (0, 1),
    "cliprange": (0, _INF), "cliprange_value": (0, _INF), "missing_eos_penalty": (0, _INF), "entropy_coef": (0, _INF),
    "center_rewards_coefficient": (0, _INF), "importance_sampling_clip_min": (0, _INF),
    "importance_sampling_clip_max": (0, _INF),
}  # fmt: skip
#: The same, where the least value itself is excluded.
OPEN = {
    "max_grad_norm": (0, _INF), "tau": (0, 1), "rms_prop_eps": (0, _INF), "line_search_shrinking_factor": (0, 1),
    "clip_obs": (0, _INF), "clip_reward": (0, _INF), "kl_coef": (0, _INF), "top_p": (0, 1), "eval_top_p": (0, 1),
    "reward_time_limit_s": (0, _INF), "prioritized_replay_eps": (0, _INF), "ref_model_mixup_alpha": (0, 1),
    "top_entropy_quantile": (0, 1), "sapo_temperature_pos": (0, _INF), "sapo_temperature_neg": (0, _INF),
}  # fmt: skip
#: Whole numbers with their least value.
WHOLE = {
    "target_update_interval": 1, "cg_max_steps": 1, "line_search_max_iter": 1, "n_critic_updates": 0, "log_every": 1,
    "logging_steps": 1, "warmup_steps": 0, "max_completion_length": 1, "n_train": 1, "ref_model_sync_steps": 1,
    "top_k": 1, "eval_max_completion_length": 1, "n_eval": 0, "batch_size": 1, "eval_steps": 0, "reward_workers": 1,
    "num_generations": 1, "steps_per_generation": 1, "num_iterations": 1, "eval_num_generations": 1,
    "eval_batch_size": 1, "n_demonstrations": 1, "completions_steps": 0, "local_rollout_forward_batch_size": 1,
}  # fmt: skip
#: Names that may be None.
OPTIONAL = {
    "norm_gamma", "max_grad_norm", "epsilon_high", "min_p", "top_p", "eval_top_p", "reward_time_limit_s", "n_train",
    "top_k", "eval_max_completion_length", "batch_size", "beta", "cliprange_value", "missing_eos_penalty",
    "importance_sampling_clip_min", "importance_sampling_clip_max",
}  # fmt: skip
#: Beginnings of words that stand for a number; an entropy coefficient may be a schedule, whose parser checks it.
WORDS = {"ent_coef": ("",), "batch_size": ("auto",)}


def check_ranges(settings: MutableMapping[str, Any], owner: type) -> None:
    """Refuses numbers out of their range and values that are not numbers; converts a whole number given as float to
    int.

    Args:
        settings: hyperparameters by name; names that no table has are skipped.
        owner: class of the module or datamodule. Names that only a user's subclass declares are skipped too, because
            their meaning is the subclass's.

    Raises:
        UsageError: names the argument, its value and the range.
    """
    declared = declared_here(owner)
    for name, value in settings.items():
        if name not in declared or (name not in CLOSED and name not in OPEN and name not in WHOLE):
            continue
        if (value is None and name in OPTIONAL) or (isinstance(value, str) and _is_word(name, value)):
            continue
        if name in WHOLE:
            settings[name] = whole_number(name, value, WHOLE[name])  # torch takes no 64.0 as a size
            continue
        low, high = CLOSED.get(name) or OPEN[name]
        excluded = name in OPEN
        number = real_number(name, value)
        if not low <= number <= high or (excluded and number == low) or math.isinf(number):
            raise UsageError(f"{name}={value} must {_range(low, high, excluded)}")


def real_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        UsageError: it is no number.
    """
    if isinstance(value, str | bool) or not hasattr(value, "__float__"):
        raise UsageError(f"{name}={value!r} must be a number")
    return float(value)


def whole_number(name: str, value: Any, least: int, unit: str = "") -> int:
    """``value`` as an int; a float such as 1e6 counts where it is whole.

    Raises:
        UsageError: it is no whole number, or smaller than ``least``.
    """
    number = real_number(name, value)
    if not number.is_integer():
        raise UsageError(f"{name}={value} must be a whole number")
    if number < least:
        raise UsageError(f"{name}={value} must be at least {least}{f' {unit}' if unit else ''}")
    return int(value)


def check_widths(name: str, net_arch: Any) -> Any:
    """Refuses widths of hidden layers that are no positive whole numbers.

    Raises:
        UsageError: names the argument.
    """
    parts = net_arch.values() if isinstance(net_arch, dict) else [net_arch]
    for part in parts:
        if part is None:
            continue
        widths = part if isinstance(part, list | tuple) else [None]
        if not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths):
            raise UsageError(f"{name}={net_arch} must be a list of hidden widths of at least 1, such as [64, 64]")
    return net_arch


def _is_word(name: str, value: str) -> bool:
    return any(value.startswith(word) for word in WORDS.get(name, ()))


def _range(low: float, high: float, excluded: bool) -> str:
    if low == 0 and math.isinf(high):
        return f"be a finite number {'above' if excluded else 'of at least'} 0"
    if math.isinf(high):
        return "be a finite number"
    return f"lie in {'(' if excluded else '['}{low}, {high}]"
