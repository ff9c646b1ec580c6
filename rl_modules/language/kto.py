"""Kahneman-Tversky optimization."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.core.settings import changed, setting
from rl_modules.language.pairs import pair_log_probs
from rl_modules.language.preference_policy import PreferencePolicy


class KTO(PreferencePolicy):
    """Kahneman-Tversky optimization: learns from single answers, each judged good or bad.

    Ethayarajh et al. 2024, arXiv:2402.01306, eqs. 7 and 8. With r = log π(y|x) - log π_ref(y|x),

        L = λ_D (1 - σ(β (r - z)))  of a good answer,     λ_U (1 - σ(β (z - r)))  of a bad one

    mean over the answers of an optimizer step. z = max(0, KL(π || π_ref)) is estimated, without gradient, from prompts
    with the answers to other prompts, over a micro-batch on all ranks.

    Names and defaults are TRL's. Departures from it: reference log-probabilities are computed at an answer's first
    visit and kept, also in checkpoints; the mismatched answer is that of the first record with another prompt, from
    half the data away on, not of the preceding one (which often answers the same prompt); dropout is off.
    """

    learning_curve = "train/rewards/margins"

    unpaired = True

    beta: float = changed(says="β, risk aversion per nat of log-ratio")
    loss_type: str = setting(
        default="kto",
        says="``kto``, or ``apo_zero_unpaired``, which sets z = 0 (arXiv:2408.06266)",
        one_of=("kto", "apo_zero_unpaired"),
    )
    desirable_weight: float = setting(
        default=1.0,
        says="λ_D, weight of good answers. For unequal classes the paper keeps λ_D n_D / (λ_U n_U) in [1, 4/3]",
        least=0,
    )
    undesirable_weight: float = setting(default=1.0, says="λ_U, weight of bad answers", least=0)

    @property
    def held_out_labels(self) -> set[bool]:
        """Returns the labels of the held-out answers; both if the datamodule does not state them."""
        records = getattr(getattr(self._trainer, "datamodule", None), "eval_records", ())
        return {bool(record["label"]) for record in records if "label" in record} or {True, False}

    @property
    def best_metric(self) -> tuple[str, str]:  # type: ignore[override]
        """The margin between good and bad answers; where only one kind is held out, the loss."""
        return ("eval/rewards/margins", "max") if len(self.held_out_labels) == 2 else ("eval/loss", "min")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        log_prob, reference, kl = self.log_probs_and_kl(batch, "train")
        loss = self.loss(log_prob, reference, batch["label"], kl)
        b = len(log_prob)
        self.num_tokens += batch["num_tokens"]
        self.record(b, loss=loss, kl=kl)
        for count, metrics in self.rewards(log_prob, reference, batch["label"]):
            self.record(count, **metrics)
        # Lightning divides by the number of micro-batches: each counts by its share of the step's answers.
        return loss * (b * batch["n_micro"] / batch["step_pairs"])

    def log_probs_and_kl(self, batch: dict[str, Any], data: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities of the judged answers, and the KL estimate from the mismatched ones."""
        log_prob, mismatched = pair_log_probs(self.model, batch)[0].sum(-1).chunk(2)
        reference, ref_mismatched = self.reference_log_probs(batch, data)
        kl = (mismatched.detach() - ref_mismatched).mean()
        if self._world_size > 1:
            kl = self.gathered(kl.view(1)).mean()
        return log_prob, reference, kl.clamp(min=0)

    def loss(self, log_prob: Tensor, reference: Tensor, label: Tensor, kl: Tensor) -> Tensor:
        """Returns the mean loss over judged answers.

        Args:
            log_prob: log π(y|x), the sum over the answer's tokens, [b].
            reference: log π_ref(y|x), [b].
            label: whether each answer is good, [b] bool.
            kl: the estimate of KL(π || π_ref), scalar.
        """
        point = kl if self.loss_type == "kto" else 0.0
        return F.kto_loss(log_prob, reference, label, point, self.beta, self.desirable_weight, self.undesirable_weight)

    @torch.no_grad()
    def rewards(self, log_prob: Tensor, reference: Tensor, label: Tensor) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Returns TRL's metrics of good and of bad answers, each with its number of answers."""
        result = []
        for name, mask in (("chosen", label), ("rejected", ~label)):
            reward = self.beta * (log_prob.detach() - reference)
            metrics = {
                f"rewards/{name}": F.masked_mean(reward, mask),
                f"logps/{name}": F.masked_mean(log_prob.detach(), mask),
            }
            result.append((mask.sum(), metrics))
        return result

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the margin between the mean rewards of good and of bad answers."""
        metrics = super().summarize(metrics)
        for prefix in ("train/", "eval/"):
            names = [f"{prefix}rewards/{side}" for side in ("chosen", "rejected")]
            if all(name in metrics for name in names):
                metrics = {**metrics, f"{prefix}rewards/margins": metrics[names[0]] - metrics[names[1]]}
        return metrics

    # ---------------------------------------------------------------- evaluation

    def log_held_out(self, batch: dict[str, Any]) -> None:
        log_prob, reference, kl = self.log_probs_and_kl(batch, "eval")
        loss = self.loss(log_prob, reference, batch["label"], kl)
        self.log_evaluation({"eval/loss": loss, "eval/kl": kl}, len(log_prob))
        # Answers of one kind have no mean if none is held out on any rank.
        sides = zip((True, False), self.rewards(log_prob, reference, batch["label"]), strict=True)
        for count, metrics in (side for label, side in sides if label in self.held_out_labels):
            self.log_evaluation({f"eval/{name}": value for name, value in metrics.items()}, int(count))

    def implicit_rewards(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        log_prob, reference, _ = self.log_probs_and_kl(batch, "eval")
        return {"reward": self.beta * (log_prob - reference)}
