"""Checks of GRPO's arguments, some of which exclude each other."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.correction import check_correction
from rl_modules.language.sampling.draw import NextToken

_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence", "sequence_token"),
    "kl_estimator": ("k1", "k2", "k3"),
}


def check_arguments(hp: Any) -> None:
    """Refuses unknown choices, and arguments that would have no effect with the others.

    Ranges that all modules share are checked by :func:`~rl_modules.common.ranges.check_ranges`.

    Args:
        hp: hyperparameters of GRPO.

    Raises:
        UsageError: names the argument, its value and what would be right.
    """
    for name, choices in _CHOICES.items():
        if hp[name] not in choices:
            raise UsageError(f"{name}={hp[name]!r} must be one of {', '.join(choices)}")
    for name in ("temperature", "delta"):
        if hp[name] is not None and not hp[name] > 0:
            raise UsageError(f"{name}={hp[name]} must be above 0")
    _check_loss(hp)
    _check_reference(hp)
    check_correction(hp)
    NextToken(hp.temperature, hp.top_k, hp.top_p, hp.min_p, hp.repetition_penalty)  # refuses what it can't sample by


def _check_loss(hp: Any) -> None:
    if hp.loss_type == "cispo" and hp.epsilon_high is None:
        raise UsageError("epsilon_high=None leaves loss_type='cispo' without its bound on the importance weight; "
                         "give one, such as 5")  # fmt: skip
    if hp.loss_type in ("cispo", "sapo") and hp.delta is not None:
        raise UsageError(f"delta={hp.delta} does nothing for loss_type={hp.loss_type!r}, which does not clip; set it "
                         "to null")  # fmt: skip
    if hp.advantages is not None and hp.scale_rewards != "group":
        raise UsageError(f"scale_rewards={hp.scale_rewards!r} does nothing with advantages={hp.advantages!r}, which "
                         "scales by itself; give one of them")  # fmt: skip


def warn_of_sequence_level(policy: Any) -> None:
    """Warns if ratios of sequences go with a loss that is not GSPO's mean over sequences."""
    level, loss_type = policy.importance_sampling_level, policy.loss_type
    if level != "token" and loss_type != "grpo":
        rank_zero_warn(f"importance_sampling_level={level!r} with loss_type={loss_type!r} is not GSPO, which averages "
                       "over sequences: GSPO is loss_type='grpo' with epsilon=3e-4 and epsilon_high=4e-4")  # fmt: skip


def _check_reference(hp: Any) -> None:
    path = hp.ref_model_name_or_path
    if not hp.beta and (hp.sync_ref_model or path is not None):
        given = "sync_ref_model=true" if hp.sync_ref_model else f"ref_model_name_or_path={path!r}"
        raise UsageError(f"{given} does nothing at beta=0, where no reference is read; set beta above 0")
    if hp.sync_ref_model and hp.lora is not None and path is None:
        raise UsageError("sync_ref_model=true can't move the reference under lora, which is the model without its "
                         "adapters; set one of them only")  # fmt: skip
