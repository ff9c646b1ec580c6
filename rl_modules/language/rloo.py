"""REINFORCE leave-one-out."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import changed, fixed
from rl_modules.language.advantages import rloo
from rl_modules.language.grpo import GRPO
from rl_modules.language.judges import reference_log_probs_of
from rl_modules.language.policy_with_reference import Rollout
from rl_modules.language.sampling.support import Filter
from rl_modules.language.scoring import in_parts, written_mask

#: An option of GRPO that RLOO sets itself.
own = partial(fixed, instead="GRPO takes it")


class RLOO(GRPO):
    """REINFORCE leave-one-out: the mean reward of a prompt's other completions is the baseline, and a completion is one
    action.

    Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019. With G completions y_i per prompt and rewards r_i,

        R_i = r_i - β Σ_t (log π(y_it) - log π_ref(y_it))            A_i = R_i - mean of the other R_j
        L   = -mean_i min(ρ_i A_i, clip(ρ_i, 1-ε, 1+ε_high) A_i)     ρ_i = π(y_i) / π_old(y_i)

    It differs from :class:`~rl_modules.GRPO` in three places: the advantage (``rloo``), the KL in the reward
    instead of the loss (:meth:`prepare`), and the ratio of the whole completion (:meth:`policy_loss`). Names and
    defaults are those of TRL 1.16, except ``gradient_checkpointing`` (TRL: on, here off) and the datamodule's
    ``num_generations`` (TRL: 2, here 8); ``normalize_advantages`` and ``reward_clip_range``, off in TRL, do not exist.
    """

    weights_tokens = False

    beta: float = changed(
        default=0.05,
        says="β, weight of the KL to the reference, in units of reward per nat; 0: no reference",
    )
    epsilon: float = changed(
        says="ε, how far the ratio of a completion may fall below 1 (and rise above it, unless ``epsilon_high`` is "
        "given)"
    )
    epsilon_high: float | None = changed(says="ε_high of the upper side; None: ``epsilon``")
    loss_type, importance_sampling_level = own("grpo"), own("token")
    reward_to_go, turn_gamma = own(False), own(1.0)
    scale_rewards, advantages, top_entropy_quantile = own("group"), own(staticmethod(rloo)), own(1.0)
    kl_estimator, use_bias_correction_kl = own("k1"), own(False)
    sapo_temperature_pos, sapo_temperature_neg = own(1.0), own(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kl_coefficient, self.beta = self.beta, 0.0
        if self.correction.startswith("token"):
            raise UsageError(
                f"importance_sampling_correction={self.correction!r} weights tokens, but RLOO's action is "
                "the whole completion; take sequence_mask or sequence_truncate"
            )

    @property
    def wants_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def compares_with_sampler(self) -> bool:
        """Whether the sampler's log-probabilities meet a forward pass's, also in the KL, 0 for equal weights."""
        return self.kl_coefficient > 0 or super().compares_with_sampler

    # ---------------------------------------------------------------- experience

    def prepare(self, rollout: Rollout) -> dict[str, Tensor]:
        """Subtracts the KL penalty from the rewards, then prepares the rollout as GRPO does.

        As in TRL, completions that ``mask_truncated_completions`` leaves out have no penalty, and their rewards stay in
        the others' baseline.
        """
        if self.kl_coefficient:
            self.sync_reference()
            passes = in_parts(self.forward_rows, rollout, self.evaluate_completions, self.filter_of(rollout))
            mask = written_mask(rollout)
            counts = rollout["finished"] if self.mask_truncated_completions else mask.any(-1)
            log_prob = passes["log_prob"] if self.rescores else rollout["log_prob"]
            kl = torch.where(mask, log_prob, 0.0).sum(-1) - torch.where(mask, passes.pop("reference"), 0.0).sum(-1)
            kl, tokens = torch.where(counts, kl, 0.0), torch.where(counts, mask.sum(1), 0).sum()
            earned = rollout["reward"]
            rollout = {**rollout, "reward": earned - self.kl_coefficient * kl, "earned": earned, "passes": passes}
            self.record(tokens, kl=kl.sum() / tokens.clamp(min=1))
        return super().prepare(rollout)

    def evaluate_completions(
        self, tokens: Tensor, prompt_length: Tensor, length: Tensor, filtered: Filter | None = None, images: Any = None
    ) -> dict[str, Tensor]:
        """Runs the forward passes that a generation needs: log π and entropy, and log π_ref, [b, L] each."""
        text = (tokens, prompt_length, length)
        result = super().evaluate_completions(*text, filtered, images)
        if self.kl_coefficient:
            result["reference"] = reference_log_probs_of(self, *text, filtered, images)
        return result

    # ---------------------------------------------------------------- optimization

    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns this micro-batch's part of the clipped loss of whole completions, see GRPO."""
        log_prob, batch = self.as_one_action(log_prob, batch)
        return super().policy_loss(log_prob, batch)

    def record_minibatch(self, log_prob: Tensor, loss: Tensor, batch: dict[str, Any]) -> None:
        """Records the loss and the fractions of clipped ratios of completions."""
        log_prob, batch = self.as_one_action(log_prob, batch)
        super().record_minibatch(log_prob, loss, {**batch, "micro_tokens": batch["micro_rows"]})

    @staticmethod
    def as_one_action(log_prob: Tensor, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Returns log π of each completion as that of a single token, [b, 1], with a matching batch."""
        mask, advantage = batch["mask"], batch["advantage"]
        ours, old = (torch.where(mask, x, 0.0).sum(-1, keepdim=True) for x in (log_prob, batch["log_prob"]))
        if advantage.ndim == 2:
            advantage = F.masked_mean(advantage, mask, 1)
        if (weight := batch.get("importance_weight")) is not None:
            batch = {**batch, "importance_weight": weight[:, :1]}  # of the sequence, the same for all of its tokens
        return ours, {**batch, "log_prob": old, "mask": mask.any(-1, keepdim=True), "advantage": advantage}
