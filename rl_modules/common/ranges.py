"""The values that hyperparameters may have, by name: checked in one place for every language algorithm."""

import math
from collections.abc import MutableMapping
from typing import Any

from rl_modules.common.calls import declared_here
from rl_modules.common.errors import UsageError

#: Least and largest value of a number; ``None`` itself is allowed where ``OPTIONAL`` names the argument.
_INF = math.inf
CLOSED = {
    "gamma": (0, 1), "lam": (0, 1), "label_smoothing": (0, 1), "min_p": (0, 1), "vf_coef": (0, _INF),
    "beta": (0, _INF), "ptx_coef": (0, _INF), "weight_decay": (0, _INF), "epsilon": (0, _INF),
    "epsilon_high": (0, _INF), "repetition_penalty": (0, _INF), "cliprange": (0, _INF), "cliprange_value": (0, _INF),
    "missing_eos_penalty": (0, _INF), "entropy_coef": (0, _INF), "center_rewards_coefficient": (0, _INF),
    "importance_sampling_clip_min": (0, _INF), "importance_sampling_clip_max": (0, _INF),
}  # fmt: skip
#: The same, where the least value itself is excluded.
OPEN = {
    "max_grad_norm": (0, _INF), "top_p": (0, 1), "ref_model_mixup_alpha": (0, 1), "top_entropy_quantile": (0, 1),
    "sapo_temperature_pos": (0, _INF), "sapo_temperature_neg": (0, _INF),
}  # fmt: skip
#: Whole numbers with their least value.
WHOLE = {
    "logging_steps": 1, "warmup_steps": 0, "max_completion_length": 1, "ref_model_sync_steps": 1, "top_k": 1,
    "completions_steps": 0, "local_rollout_forward_batch_size": 1,
}  # fmt: skip
#: Names that may be None.
OPTIONAL = {
    "max_grad_norm", "epsilon_high", "min_p", "top_p", "top_k", "beta", "cliprange_value", "missing_eos_penalty",
    "importance_sampling_clip_min", "importance_sampling_clip_max",
}  # fmt: skip


def check_ranges(settings: MutableMapping[str, Any], owner: type) -> None:
    """Refuses numbers out of their range and values that are not numbers; converts a whole number given as float to
    int.

    Args:
        settings: hyperparameters by name; names that no table has are skipped.
        owner: class of the module. Names that only a user's subclass declares are skipped too, because
            their meaning is the subclass's.

    Raises:
        UsageError: names the argument, its value and the range.
    """
    declared = declared_here(owner)
    for name, value in settings.items():
        if name not in declared or (name not in CLOSED and name not in OPEN and name not in WHOLE):
            continue
        if value is None and name in OPTIONAL:
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


def _range(low: float, high: float, excluded: bool) -> str:
    if low == 0 and math.isinf(high):
        return f"be a finite number {'above' if excluded else 'of at least'} 0"
    if math.isinf(high):
        return "be a finite number"
    return f"lie in {'(' if excluded else '['}{low}, {high}]"
