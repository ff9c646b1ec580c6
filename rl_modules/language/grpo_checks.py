"""Checks of GRPO: options that exclude each other or make one another idle, and the advantages of a generation."""

from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_modules.common.errors import UsageError


def check_scale(name: str, value: Any) -> str:
    """Returns the word for what rewards are scaled by; true and false are words of TRL."""
    word = {True: "group", False: "none"}[value] if isinstance(value, bool) else value
    if word not in ("group", "batch", "none"):
        raise UsageError(f"{name}={value!r} must be one of group, batch, none")
    return str(word)


def path_of(given: Any) -> str | None:
    """Converts a function to its import path, which a checkpoint may hold; names and paths are returned unchanged."""
    if given is None or isinstance(given, str):
        return given
    path = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', '')}"
    if not callable(given) or isinstance(given, type) or "<" in path or path.endswith(":"):
        raise UsageError(
            f"advantages={given!r} has no import path, by which a checkpoint could find it again; give a "
            "function at the first level of a module, or override score_group in a subclass"
        )
    return path


def without_clip(module: Any) -> str | bool:
    """The reason why the clip's bounds are idle."""
    return module.loss_type == "sapo" and "with loss_type='sapo', which does not clip"


def without_sapo(module: Any) -> str | bool:
    """The reason why the temperatures of ``sapo`` are idle."""
    return module.loss_type != "sapo" and "without loss_type='sapo'; set that"


def without_correction(module: Any) -> str | bool:
    """The reason why the bounds on importance weights are idle."""
    return module.correction == "none" and "without an importance_sampling_correction; set that"


def refuse_contradictions(module: Any) -> None:
    """Refuses arguments of which one would do nothing, or can't do its part, beside another."""
    hp: Any = module.hparams
    low, high = hp.importance_sampling_clip_min, hp.importance_sampling_clip_max
    if module.loss_type == "cispo" and hp.epsilon_high is None:
        raise UsageError(
            "epsilon_high=None leaves loss_type='cispo' without its bound on the importance weight; give one, such as 5"
        )
    if low is not None and high is not None and low > high:
        raise UsageError(f"importance_sampling_clip_min={low} must not be above importance_sampling_clip_max={high}")


def check_run(module: Any) -> None:
    """Refuses groups of one completion where the baseline is the group's; warns of a level that is not GSPO's."""
    from rl_modules.language.grpo import GRPO

    is_own = type(module).advantages is not GRPO.advantages or type(module).score_group is not GRPO.score_group
    compares = not is_own
    if compares and module.advantage_function is not None:
        from rl_modules.language.advantages import IN_GROUPS

        compares = module.advantage_function in IN_GROUPS
    if compares and getattr(module.trainer.datamodule, "num_generations", 2) < 2:
        raise UsageError("num_generations=1 leaves a completion nothing to be compared with; give at least 2")
    level, loss_type = module.importance_sampling_level, module.loss_type
    if level != "token" and loss_type != "grpo":
        rank_zero_warn(
            f"importance_sampling_level={level!r} with loss_type={loss_type!r} is not GSPO, which averages "
            "over sequences: GSPO is loss_type='grpo' with epsilon=3e-4 and epsilon_high=4e-4"
        )


def require_advantages(advantage: Tensor, reward: Tensor, width: int) -> Tensor:
    """Checks the advantages of a generation, which may be a subclass's own; all ranks see the same ones."""
    enough = advantage.ndim == 1 or (advantage.ndim == 2 and advantage.shape[1] >= width)
    if not enough or len(advantage) != len(reward):
        raise UsageError(
            f"advantages have shape {tuple(advantage.shape)} for {len(reward)} completions of up to "
            f"{width} tokens; return one number per completion [B], or per token [B, L]"
        )
    unscored = reward.isnan() if advantage.ndim == 1 else reward.isnan().unsqueeze(1)
    advantage = torch.where(unscored, 0.0, advantage)
    if not bool(advantage.isfinite().all()):
        row = int((~advantage.isfinite()).view(len(reward), -1).any(1).nonzero()[0])
        raise UsageError(
            f"advantages of completion {row}, whose reward is {float(reward[row]):g}, are not finite; a "
            "reward of NaN is none, which nanmean leaves out where mean does not"
        )
    return advantage
