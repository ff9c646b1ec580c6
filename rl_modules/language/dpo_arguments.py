"""Arguments of DPO: the names of its losses, their weights, and what contradicts another."""

from typing import Any

from rl_modules.common.errors import UsageError, did_you_mean, real_number
from rl_modules.functional.pair_losses import OF_DIFFERENCES, PAIR_LOSSES, REFERENCE_FREE, SMOOTHED

LOSSES = (*PAIR_LOSSES, "sft")
#: Losses to which their papers add the likelihood of the chosen answers, with weight 1.
_WITH_LIKELIHOOD = frozenset({"cpo", "orpo"})


def check_losses(name: str, value: Any) -> Any:
    """Refuses what is no loss, and a list that is empty or has one twice."""
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [value]
    for loss in names:
        if loss not in LOSSES:
            near = did_you_mean(loss, LOSSES) if isinstance(loss, str) else ""
            raise UsageError(f"{name}={value!r} must be one of {', '.join(LOSSES)}, or a list of them{near}")
    if len({*names}) < len(names) or not {*names} - {"sft"}:
        raise UsageError(f"{name}={value!r} must name different losses, and at least one of two answers beside sft")
    return value if isinstance(value, str) else names


def check_weights(name: str, value: Any) -> Any:
    """Refuses weights that are no finite numbers above 0."""
    if value is not None and not (
        isinstance(value, list | tuple) and all(0 < real_number(name, weight) < float("inf") for weight in value)
    ):
        raise UsageError(f"{name}={value!r} must be finite numbers above 0, one per loss of loss_type")
    return value


def weighted(module: Any) -> dict[str, float]:
    """Returns the weight of each loss by name."""
    names = [module.loss_type] if isinstance(module.loss_type, str) else module.loss_type
    return dict(zip(names, module.loss_weights or [1.0] * len(names), strict=True))


def likelihood_weight(module: Any) -> float:
    """Returns the weight of the chosen answers' negative log-likelihood per token, 0 for none."""
    losses = weighted(module)
    usual = losses.get("sft", 1.0 if _WITH_LIKELIHOOD & losses.keys() else 0.0)
    return usual if module.rpo_alpha is None else float(module.rpo_alpha)


def refuse_contradictions(module: Any) -> None:
    """Refuses arguments of which one would do nothing, or can't do its part, beside another."""
    hp: Any = module.hparams
    names = [hp.loss_type] if isinstance(hp.loss_type, str) else hp.loss_type
    if hp.loss_weights is not None and len(hp.loss_weights) != len(names):
        raise UsageError(f"loss_weights={hp.loss_weights} are {len(hp.loss_weights)} numbers for loss_type="
                         f"{hp.loss_type!r}; give one for each loss")  # fmt: skip
    if hp.rpo_alpha is not None and "sft" in names:
        raise UsageError(f"rpo_alpha={hp.rpo_alpha} and sft in loss_type={names} weigh the same term; give the weight "
                         "in loss_weights")  # fmt: skip
    if hp.label_smoothing and not SMOOTHED & {*names}:
        raise UsageError(f"label_smoothing={hp.label_smoothing} does nothing for loss_type={hp.loss_type!r}; "
                         f"set it to 0, or take {', '.join(sorted(SMOOTHED))}")  # fmt: skip
    if "exo_pair" in names and not hp.label_smoothing:
        raise UsageError("label_smoothing=0 leaves loss_type='exo_pair' without a bound; give one, such as 1e-3")
    if hp.f_divergence_type != "reverse_kl" and (others := [n for n in names if n not in {*OF_DIFFERENCES, "sft"}]):
        raise UsageError(f"f_divergence_type={hp.f_divergence_type!r} is not defined for loss_type={others[0]!r}; take "
                         f"one of {', '.join(sorted(OF_DIFFERENCES))}")  # fmt: skip
    free = sorted(REFERENCE_FREE & {*names})
    if free and (len({*names} - {"sft"}) > 1 or hp.ref_model_name_or_path is not None or hp.sync_ref_model):
        raise UsageError(f"loss_type={hp.loss_type!r}: {free[0]} has no reference policy; give it no other loss, no "
                         "ref_model_name_or_path and no sync_ref_model")  # fmt: skip
