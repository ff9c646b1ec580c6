"""Direct preference optimization, and its relatives that compare two answers."""

from typing import Any

from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import changed, setting
from rl_modules.language.pairs import pair_log_probs
from rl_modules.language.preference_policy import PreferencePolicy


class DPO(PreferencePolicy):
    """Direct preference optimization: fits the policy to preferences, with the policy as implicit reward model.

    Rafailov et al. 2023, arXiv:2305.18290, eq. 7. For a prompt x with a chosen and a rejected answer, the loss is the

        r(y) = β (log π(y|x) - log π_ref(y|x))            L = -log σ(r(y_c) - r(y_r))

    mean over the pairs of an optimizer step, whatever the number of micro-batches and ranks. The optimum is
    π ∝ π_ref exp(r*/β), r* the reward of the Bradley-Terry model that generated the preferences.

    Names and defaults are TRL's. Departures from it: reference log-probabilities are computed at a pair's first visit
    and kept, also in checkpoints; one forward pass reads both answers after one copy of the prompt; dropout is
    off; ``rpo_alpha`` stands for ``loss_type: [sigmoid, sft]`` with ``loss_weights: [1, rpo_alpha]``.
    """

    learning_curve = "train/rewards/accuracies"
    best_metric = ("eval/rewards/accuracies", "max")

    beta: float = changed(says="β, units of implicit reward per nat of log-ratio (for ``ipo`` the regularisation τ)")
    loss_type: str = setting(
        "sigmoid", "``sigmoid`` (DPO), ``ipo`` (squared error of the log-ratio per token, arXiv:2310.12036), ``hinge`` "
        "(SLiC, arXiv:2305.10425) or ``robust`` (unbiased under wrong labels, arXiv:2403.00409)",
        one_of=("sigmoid", "ipo", "hinge", "robust"))  # fmt: skip
    label_smoothing: float = setting(
        0.0, "ε, the probability that a preference is wrong, in [0, 0.5); for ``sigmoid`` (conservative DPO) and "
        "``robust``", least=0, below=0.5)  # fmt: skip
    rpo_alpha: float | None = setting(
        None, "weight of the chosen answers' negative log-likelihood per token, added to the loss (RPO, "
        "arXiv:2404.19733: 1); None: no such term", above=0)  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type in ("ipo", "hinge"):
            raise UsageError(f"label_smoothing={self.label_smoothing} does nothing for loss_type={self.loss_type!r}; "
                             "set it to 0, or take sigmoid or robust")  # fmt: skip

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        log_prob, _ = pair_log_probs(self.model, batch)
        metrics = self.pair_metrics(log_prob, batch, "train")
        b, loss = len(batch["lengths"]), metrics["loss"]
        self.num_tokens += batch["num_tokens"]
        # Lightning divides by the number of micro-batches: each counts by its share of the step's pairs.
        total = loss * (b * batch["n_micro"] / batch["step_pairs"])
        if self.rpo_alpha is not None:
            likelihood, tokens = -log_prob[:b].sum(), batch["lengths"][:, 1].sum()
            total = total + self.rpo_alpha * likelihood * (batch["n_micro"] / batch["step_chosen_tokens"])
            self.record(tokens, nll_loss=likelihood / tokens)
        self.record(b, **metrics)
        return total

    def log_pairs(self, batch: dict[str, Any]) -> None:
        metrics = self.pair_metrics(pair_log_probs(self.model, batch)[0], batch, "eval")
        self.log_evaluation({f"eval/{name}": value for name, value in metrics.items()}, len(batch["lengths"]))

    def implicit_rewards(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        sums = pair_log_probs(self.model, batch)[0].sum(-1).chunk(2)
        reference = self.reference_log_probs(batch, "eval")
        chosen, rejected = (self.beta * (ours - theirs) for ours, theirs in zip(sums, reference, strict=True))
        return {"chosen_reward": chosen, "rejected_reward": rejected}

    # ---------------------------------------------------------------- the loss

    def pair_metrics(self, log_prob: Tensor, batch: dict[str, Any], data: str) -> dict[str, Tensor]:
        """Returns the ``loss`` of a batch and TRL's metrics: mean implicit rewards and log-probabilities.

        Args:
            log_prob: of both answers' tokens, [2b, L].
            batch: see :meth:`reference_log_probs`.
            data: ``train`` or ``eval``.
        """
        chosen, rejected = log_prob.sum(-1).chunk(2)
        ref_chosen, ref_rejected = self.reference_log_probs(batch, data)
        loss = self.loss(chosen, rejected, ref_chosen, ref_rejected, batch["lengths"][:, 1], batch["lengths"][:, 2])
        chosen, rejected = chosen.detach(), rejected.detach()
        chosen_reward, rejected_reward = self.beta * (chosen - ref_chosen), self.beta * (rejected - ref_rejected)
        return {
            "loss": loss,
            "rewards/chosen": chosen_reward.mean(),
            "rewards/rejected": rejected_reward.mean(),
            "rewards/accuracies": (chosen_reward > rejected_reward).float().mean(),
            "rewards/margins": (chosen_reward - rejected_reward).mean(),
            "logps/chosen": chosen.mean(),
            "logps/rejected": rejected.mean(),
        }

    def loss(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor,
        chosen_length: Tensor, rejected_length: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns the mean loss over pairs; related methods override it.

        Args:
            chosen: log π(y_c|x), the sum over the answer's tokens, [b].
            rejected: log π(y_r|x), [b].
            ref_chosen: log π_ref(y_c|x), [b].
            ref_rejected: log π_ref(y_r|x), [b].
            chosen_length: tokens of y_c, EOS included, [b].
            rejected_length: tokens of y_r, [b].
        """
        if self.loss_type == "ipo":
            # IPO's authors report results with means over tokens.
            chosen, ref_chosen = chosen / chosen_length, ref_chosen / chosen_length
            rejected, ref_rejected = rejected / rejected_length, ref_rejected / rejected_length
        return F.dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected, self.beta, self.loss_type, self.label_smoothing
        )  # fmt: skip
