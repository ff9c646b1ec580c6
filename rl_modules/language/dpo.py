"""Direct preference optimization, and its relatives that compare two answers."""

from typing import Any

from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError, did_you_mean, real_number
from rl_modules.core.settings import changed, setting
from rl_modules.functional.pair_losses import (
    DIVERGENCES,
    NORMALISED,
    OF_DIFFERENCES,
    PAIR_LOSSES,
    REFERENCE_FREE,
    SMOOTHED,
    length_desensitized,
)
from rl_modules.language.pairs import pair_log_probs
from rl_modules.language.preference_policy import PreferencePolicy

LOSSES = (*PAIR_LOSSES, "sft")
#: Losses to which their papers add the likelihood of the chosen answers, with weight 1.
_WITH_LIKELIHOOD = frozenset({"cpo", "orpo"})


def check_losses(name: str, value: Any) -> Any:
    """Refuses what is no loss, and a list that is empty or has one twice."""
    names = _names(value)
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


def _names(loss_type: Any) -> list[Any]:
    return list(loss_type) if isinstance(loss_type, list | tuple) else [loss_type]


class DPO(PreferencePolicy):
    """Direct preference optimization: fits the policy to preferences, with the policy as implicit reward model.

    Rafailov et al. 2023, arXiv:2305.18290, eq. 7. For a prompt x with a chosen and a rejected answer, the loss is the

        r(y) = β (log π(y|x) - log π_ref(y|x))            L = -log σ(r(y_c) - r(y_r))

    mean over the pairs of an optimizer step, whatever the number of micro-batches and ranks. The optimum is
    π ∝ π_ref exp(r*/β), r* the reward of the Bradley-Terry model that generated the preferences.

    Names and defaults are TRL's. Departures from it: reference log-probabilities are computed at a pair's first visit
    and kept, also in checkpoints; one forward pass reads both answers after one copy of the prompt; dropout is
    off; ``rpo_alpha`` stands for ``loss_type: [sigmoid, sft]`` with ``loss_weights: [1, rpo_alpha]``; both AOT losses
    sort the pairs of a micro-batch on one rank.
    """

    learning_curve = "train/rewards/accuracies"
    best_metric = ("eval/rewards/accuracies", "max")

    beta: float = changed(says="β, units of implicit reward per nat of log-ratio (for ``ipo`` the regularisation τ)")
    loss_type: str | list[str] = setting(
        default="sigmoid",
        says="a loss of :func:`~rl_modules.functional.dpo_loss`, or ``sft`` (the chosen answers' negative "
        "log-likelihood per token): ``sigmoid`` (DPO), ``ipo``, ``hinge`` (SLiC), ``robust``, ``exo_pair``, "
        "``nca_pair``, ``bco_pair``, ``sppo_hard``, ``aot``, ``aot_unpaired``, ``apo_zero``, ``apo_down``, "
        "``discopop``, ``sigmoid_norm``; without a reference, ``simpo``, ``cpo`` and ``orpo``, of which the last two "
        "add ``sft`` with weight 1. A list: their weighted sum",
        check=check_losses,
    )
    loss_weights: list[float] | None = setting(
        default=None,
        says="weights of the losses of a list, as in MPO's ``[0.8, 0.2, 1.0]`` of ``[sigmoid, bco_pair, sft]``; None: "
        "all 1",
        check=check_weights,
    )
    label_smoothing: float = setting(
        default=0.0,
        says="ε, the probability that a preference is wrong, in [0, 0.5); for ``sigmoid`` (conservative DPO), "
        "``sigmoid_norm``, ``cpo``, ``simpo``, ``robust`` and AOT; ``exo_pair`` needs one, such as 1e-3",
        least=0,
        below=0.5,
        idle=lambda m: not SMOOTHED & {*m.losses} and "with this loss_type; take sigmoid",
    )
    f_divergence_type: str = setting(
        default="reverse_kl",
        says="divergence to the reference (f-DPO, arXiv:2309.16240), for losses of the answers' difference",
        one_of=DIVERGENCES,
    )
    f_alpha_divergence_coef: float = setting(
        default=0.5,
        says="α of ``alpha_divergence``",
        idle=lambda m: m.f_divergence_type != "alpha_divergence" and "without f_divergence_type=alpha_divergence",
    )
    ld_alpha: float | None = setting(
        default=None,
        says="weight of the tokens beyond the shorter answer's length (LD-DPO, arXiv:2409.06411); None: 1",
        least=0,
        most=1,
    )
    discopop_tau: float = setting(
        default=0.05,
        says="τ of ``discopop``",
        above=0,
        idle=lambda m: "discopop" not in m.losses and "without loss_type=discopop",
    )
    simpo_gamma: float = setting(
        default=0.5,
        says="γ of ``simpo``, margin of the chosen answer in units of reward",
        least=0,
        idle=lambda m: "simpo" not in m.losses and "without loss_type=simpo",
    )
    rpo_alpha: float | None = setting(
        default=None,
        says="weight of the chosen answers' negative log-likelihood per token, added to the loss (RPO, "
        "arXiv:2404.19733: 1); None: no such term but that of ``sft``, ``cpo`` and ``orpo``",
        above=0,
    )

    def __post_init__(self) -> None:
        refuse_contradictions(self)
        self.reference_free = self.reference_free or bool(REFERENCE_FREE & self.losses.keys())
        super().__post_init__()

    @property
    def losses(self) -> dict[str, float]:
        """The weight of each loss of two answers by name."""
        return {name: weight for name, weight in self._weighted.items() if name != "sft"}

    @property
    def _weighted(self) -> dict[str, float]:
        names = _names(self.loss_type)
        return dict(zip(names, self.loss_weights or [1.0] * len(names), strict=True))

    @property
    def likelihood_weight(self) -> float:
        """The weight of the chosen answers' negative log-likelihood per token, 0 for none."""
        usual = self._weighted.get("sft", 1.0 if _WITH_LIKELIHOOD & self.losses.keys() else 0.0)
        return usual if self.rpo_alpha is None else self.rpo_alpha

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        log_prob, _ = pair_log_probs(self.model, batch)
        metrics = self.pair_metrics(log_prob, batch, "train")
        b = len(batch["lengths"])
        self.num_tokens += batch["num_tokens"]
        # Lightning divides by the number of micro-batches: each counts by its share of the step's pairs.
        total = metrics.pop("loss") * (b * batch["n_micro"] / batch["step_pairs"])
        if weight := self.likelihood_weight:
            likelihood, tokens = self.likelihood(log_prob, batch)
            total = total + weight * likelihood * (tokens * batch["n_micro"] / batch["step_chosen_tokens"])
            self.record(tokens, nll_loss=likelihood.detach())
        self.record(b, **metrics)
        self.record(loss=total.detach())
        return total

    def log_held_out(self, batch: dict[str, Any]) -> None:
        log_prob, _ = pair_log_probs(self.model, batch)
        metrics = self.pair_metrics(log_prob, batch, "eval")
        if weight := self.likelihood_weight:
            metrics["loss"] = metrics["loss"] + weight * self.likelihood(log_prob, batch)[0]
        self.log_evaluation({f"eval/{name}": value for name, value in metrics.items()}, len(batch["lengths"]))

    def likelihood(self, log_prob: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the chosen answers' negative log-likelihood per token, and their number of tokens."""
        tokens = batch["lengths"][:, 1].sum()
        return -log_prob[: len(batch["lengths"])].sum() / tokens, tokens

    def implicit_rewards(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        sums = self.sums(pair_log_probs(self.model, batch)[0], batch).chunk(2)
        reference = self.reference_log_probs(batch, "eval")
        chosen, rejected = self.pair_rewards(sums[0], sums[1], reference[0], reference[1], batch)
        return {"chosen_reward": chosen, "rejected_reward": rejected}

    # ---------------------------------------------------------------- the loss

    def pair_metrics(self, log_prob: Tensor, batch: dict[str, Any], data: str) -> dict[str, Tensor]:
        """Returns the ``loss`` of a batch and TRL's metrics: mean implicit rewards and log-probabilities.

        Args:
            log_prob: of both answers' tokens, [2b, L].
            batch: see :meth:`reference_log_probs`.
            data: ``train`` or ``eval``.
        """
        chosen, rejected = self.sums(log_prob, batch).chunk(2)
        ref_chosen, ref_rejected = self.reference_log_probs(batch, data)
        loss = self.loss(chosen, rejected, ref_chosen, ref_rejected, batch["lengths"][:, 1], batch["lengths"][:, 2])
        chosen, rejected = chosen.detach(), rejected.detach()
        chosen_reward, rejected_reward = self.pair_rewards(chosen, rejected, ref_chosen, ref_rejected, batch)
        return {
            "loss": loss,
            "rewards/chosen": chosen_reward.mean(),
            "rewards/rejected": rejected_reward.mean(),
            "rewards/accuracies": (chosen_reward > rejected_reward).float().mean(),
            "rewards/margins": (chosen_reward - rejected_reward).mean(),
            "logps/chosen": chosen.mean(),
            "logps/rejected": rejected.mean(),
        }

    def sums(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns log π of both answers, [2b], from that of their tokens, [2b, L]; ``ld_alpha`` weighs a longer end."""
        if self.ld_alpha is None:
            return super().sums(log_prob, batch)
        return length_desensitized(log_prob, batch["lengths"][:, 1], batch["lengths"][:, 2], self.ld_alpha)

    def pair_rewards(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Returns the implicit rewards of both answers, [b] each; those of ``simpo`` and ``orpo`` are per token."""
        rewards = self.beta * (chosen - ref_chosen), self.beta * (rejected - ref_rejected)
        if NORMALISED & REFERENCE_FREE & self.losses.keys():
            return rewards[0] / batch["lengths"][:, 1], rewards[1] / batch["lengths"][:, 2]
        return rewards

    def loss(
        self,
        chosen: Tensor,
        rejected: Tensor,
        ref_chosen: Tensor,
        ref_rejected: Tensor,
        chosen_length: Tensor,
        rejected_length: Tensor,
    ) -> Tensor:
        """Returns the mean loss over pairs; related methods override it.

        Args:
            chosen: log π(y_c|x), the sum over the answer's tokens, [b].
            rejected: log π(y_r|x), [b].
            ref_chosen: log π_ref(y_c|x), [b].
            ref_rejected: log π_ref(y_r|x), [b].
            chosen_length: tokens of y_c, EOS included, [b].
            rejected_length: tokens of y_r, [b].
        """
        total = chosen.new_zeros(())
        for name, weight in self.losses.items():
            total = total + weight * F.dpo_loss(
                chosen,
                rejected,
                ref_chosen,
                ref_rejected,
                self.beta,
                name,
                self.label_smoothing if name in SMOOTHED else 0.0,
                chosen_length=chosen_length,
                rejected_length=rejected_length,
                f_divergence_type=self.f_divergence_type,
                f_alpha_divergence_coef=self.f_alpha_divergence_coef,
                discopop_tau=self.discopop_tau,
                simpo_gamma=self.simpo_gamma,
            )
        return total


def refuse_contradictions(module: "DPO") -> None:
    """Refuses arguments of which one would do nothing, or can't do its part, beside another."""
    hp = module.hparams
    names = _names(hp.loss_type)
    if hp.loss_weights is not None and len(hp.loss_weights) != len(names):
        raise UsageError(
            f"loss_weights={hp.loss_weights} are {len(hp.loss_weights)} numbers for loss_type="
            f"{hp.loss_type!r}; give one for each loss"
        )
    if hp.rpo_alpha is not None and "sft" in names:
        raise UsageError(
            f"rpo_alpha={hp.rpo_alpha} and sft in loss_type={names} weigh the same term; give the weight "
            "in loss_weights"
        )
    if "exo_pair" in names and not hp.label_smoothing:
        raise UsageError("label_smoothing=0 leaves loss_type='exo_pair' without a bound; give one, such as 1e-3")
    if hp.f_divergence_type != "reverse_kl" and (others := [n for n in names if n not in {*OF_DIFFERENCES, "sft"}]):
        raise UsageError(
            f"f_divergence_type={hp.f_divergence_type!r} is not defined for loss_type={others[0]!r}; take "
            f"one of {', '.join(sorted(OF_DIFFERENCES))}"
        )
    free = sorted(REFERENCE_FREE & {*names})
    if free and (len({*names} - {"sft"}) > 1 or hp.ref_model_name_or_path is not None or hp.sync_ref_model):
        raise UsageError(
            f"loss_type={hp.loss_type!r}: {free[0]} has no reference policy; give it no other loss, no "
            "ref_model_name_or_path and no sync_ref_model"
        )
