"""Arguments of GRPO beside each other: what contradicts another, and the reasons why one is idle."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rl_modules.common.errors import UsageError
from rl_modules.language.advantages import IN_GROUPS


def check_scale(name: str, value: Any) -> str:
    """Returns the word for what rewards are scaled by; true and false are words of TRL."""
    word = {True: "group", False: "none"}[value] if isinstance(value, bool) else value
    if word not in ("group", "batch", "none"):
        raise UsageError(f"{name}={value!r} must be one of group, batch, none")
    return str(word)


def refuse_contradictions(module: Any) -> None:
    """Refuses arguments of which one would do nothing, or can't do its part, beside another."""
    hp: Any = module.hparams
    path, reference, loss_type = hp.get("advantages"), hp.ref_model_name_or_path, module.loss_type
    low, high = hp.importance_sampling_clip_min, hp.importance_sampling_clip_max
    if loss_type == "cispo" and hp.epsilon_high is None:
        raise UsageError("epsilon_high=None leaves loss_type='cispo' without its bound on the importance weight; give "
                         "one, such as 5")  # fmt: skip
    if loss_type in ("cispo", "sapo") and hp.delta is not None:
        raise UsageError(f"delta={hp.delta} does nothing for loss_type={loss_type!r}, which does not clip; set it to "
                         "null")  # fmt: skip
    if path is not None and module.scale_rewards != "group":
        raise UsageError(f"scale_rewards={module.scale_rewards!r} does nothing with advantages={path!r}, which scales "
                         "by itself; give one of them")  # fmt: skip
    if not hp.beta and (hp.sync_ref_model or reference is not None):
        given = "sync_ref_model=true" if hp.sync_ref_model else f"ref_model_name_or_path={reference!r}"
        raise UsageError(f"{given} does nothing at beta=0, where no reference is read; set beta above 0")
    if low is not None and high is not None and low > high:
        raise UsageError(f"importance_sampling_clip_min={low} must not be above importance_sampling_clip_max={high}")


def check_run(module: Any) -> None:
    """Refuses groups of one completion where the baseline is the group's; warns of a level that is not GSPO's."""
    from rl_modules.language.grpo import GRPO

    is_own = type(module).advantages is not GRPO.advantages or type(module).score_group is not GRPO.score_group
    compares = not is_own and module.advantage_function in (None, *IN_GROUPS)
    if compares and getattr(module.trainer.datamodule, "num_generations", 2) < 2:
        raise UsageError("num_generations=1 leaves a completion nothing to be compared with; give at least 2")
    level, loss_type = module.importance_sampling_level, module.loss_type
    if level != "token" and loss_type != "grpo":
        rank_zero_warn(f"importance_sampling_level={level!r} with loss_type={loss_type!r} is not GSPO, which averages "
                       "over sequences: GSPO is loss_type='grpo' with epsilon=3e-4 and epsilon_high=4e-4")  # fmt: skip


def without_clip(module: Any) -> str | None:
    """The reason why the clip's bounds are idle."""
    return "with loss_type='sapo', which does not clip" if module.loss_type == "sapo" else None


def without_epsilon(module: Any) -> str | None:
    """The reason why ``epsilon`` is idle."""
    bounds = module.loss_type == "cispo"
    return "with loss_type='cispo', which bounds by epsilon_high alone" if bounds else without_clip(module)


def without_sapo(module: Any) -> str | None:
    """The reason why SAPO's temperatures are idle."""
    return "without loss_type='sapo'; set that" if module.loss_type != "sapo" else None


def without_reward_to_go(module: Any) -> str | None:
    """The reason why a discount of turns is idle."""
    return None if module.reward_to_go else "without reward_to_go=true; set that"


def without_correction(module: Any) -> str | None:
    """The reason why bounds on importance weights are idle."""
    return None if module.correction != "none" else "without an importance_sampling_correction; set that"
