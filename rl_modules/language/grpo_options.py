"""Options of GRPO that exclude each other, or that one of the others makes idle."""

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
