"""Group relative policy optimization, and the family around it."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import Converted, setting
from rl_modules.language.advantages import (
    IN_GROUPS,
    check_scale,
    code_of_advantages,
    load_argument,
    path_of,
    reads_each_function,
    require_advantages,
    scores_by,
    scores_of_each,
    turn_advantages,
)
from rl_modules.language.architecture import wants_router_loss
from rl_modules.language.completion_metrics import record_clipping, record_generation
from rl_modules.language.entropy import entropy_terms
from rl_modules.language.experts import completions_router_loss, router_logits
from rl_modules.language.fast.shared_scoring import can_share, shared_log_probs
from rl_modules.language.judges import reference_log_probs_of
from rl_modules.language.policy_with_reference import PolicyWithReference, Rollout
from rl_modules.language.sampling.correction import importance_weights
from rl_modules.language.scoring import completion_log_probs, extent_in, in_parts, written_mask


def without_clip(module: "GRPO") -> str | bool:
    """The reason why the clip's bounds are idle."""
    return module.loss_type == "sapo" and "with loss_type='sapo', which does not clip"


def without_sapo(module: "GRPO") -> str | bool:
    """The reason why the temperatures of ``sapo`` are idle."""
    return module.loss_type != "sapo" and "without loss_type='sapo'; set that"


def without_correction(module: "GRPO") -> str | bool:
    """The reason why the bounds on importance weights are idle."""
    return module.correction == "none" and "without an importance_sampling_correction; set that"


class GRPO(PolicyWithReference):
    """Group relative policy optimization: the mean reward of the answers to a prompt replaces the critic.

    Shao et al. 2024, arXiv:2402.03300, section 4.1; DeepSeek-AI 2025, arXiv:2501.12948. With G completions per prompt,

        A = (r - mean_g(r)) / std_g(r)          ℓ_t = -min(ρ_t A, clip(ρ_t, 1-ε, 1+ε_high) A) + β·KL(π || π_ref)_t

    and the loss is the sum of ℓ_t over the optimizer step, normalised according to ``loss_type``. Neither the number of
    micro-batches nor of ranks changes a token's weight, except for bnpo, which normalises by micro-batch.

    π_old of the first minibatch after a generation is π itself, detached: its ratio is exactly 1. Later ones use the
    sampler's log-probabilities. If decoding rounds differently from training (16 bits), an extra forward pass computes
    them. If sampling was filtered (``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``), π and π_ref are the
    filtered distributions, on the tokens that sampling kept. Without a KL, completions whose advantage is 0 count in
    the normalisers but skip the forward pass.

    Names and defaults are those of TRL 1.16. Departures from it: ``gradient_checkpointing`` is off by default (TRL:
    on); ``dapo`` divides by the tokens of the optimizer step (TRL: by an equal share of its generation's tokens);
    ``entropy`` is that of the whole generation at the time of sampling.
    """

    beta: float = setting(
        default=0.0,
        says="β, weight of the KL to the reference, in units of advantage per nat; 0: no reference",
        least=0,
    )
    epsilon: float = setting(
        default=0.2,
        says="ε, how far the ratio may fall below 1 (and rise above it, unless ``epsilon_high`` is given)",
        least=0,
        idle=lambda m: (
            without_clip(m) or (m.loss_type == "cispo" and "with loss_type='cispo', which bounds by epsilon_high alone")
        ),
    )
    epsilon_high: float | None = setting(
        default=None,
        says="ε_high of the upper side; None: ``epsilon``. DAPO: 0.28. For ``cispo`` it is the bound on the "
        "importance weight itself, and must be given (ScaleRL, arXiv:2510.13786: 5)",
        least=0,
        idle=without_clip,
    )
    delta: float | None = setting(
        default=None,
        says="bound on the ratio that also holds for negative advantages, of use above 1 + ε_high; None: none. Not "
        "for ``cispo`` and ``sapo``",
        above=0,
    )
    loss_type: str = setting(
        default="dapo",
        says="``grpo`` (mean of the sequences' means), ``bnpo`` (tokens of the micro-batch), ``dapo`` (tokens of "
        "the optimizer step) or ``dr_grpo`` (sequences times ``max_completion_length``); ``cispo`` (a bounded "
        "importance weight on log π in place of the clip, reduced as ``dapo``) or ``sapo`` (a sigmoid of the ratio in "
        "place of the clip, reduced as ``grpo``)",
        one_of=("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"),
    )
    sapo_temperature_pos: float = setting(
        default=1.0,
        says="decay rate of the ``sapo`` gate with the ratio's distance from 1, for positive advantages",
        above=0,
        idle=without_sapo,
    )
    sapo_temperature_neg: float = setting(
        default=1.05, says="the same for other advantages", above=0, idle=without_sapo
    )
    scale_rewards: Converted[bool | str, str] = setting(
        default="group",
        says="divide advantages by the standard deviation of rewards in the ``group``, in the ``batch`` (one "
        "generation over all ranks), or not at all (``none``); true and false mean ``group`` and ``none``, as in TRL",
        check=check_scale,
        idle=lambda m: m.advantage_function is not None and "beside advantages, which scale by themselves",
    )
    advantage_function: Converted[
        Annotated[Callable[..., Tensor] | str | None, str | None], Callable[..., Tensor] | None
    ] = setting(
        default=None,
        says="function from rewards [P, G] to advantages [P, G] instead of the group's standardised rewards: "
        "``grpo``, ``dr_grpo``, ``rloo``, ``reinforce_plus_plus``, ``gdpo``, or an import path "
        "``my_package.my_function``; in Python also the function itself",
        alias="advantages",
        stores=path_of,
        code=code_of_advantages,
    )
    importance_sampling_level: str = setting(
        default="token",
        says="ratio of each ``token``, of the whole ``sequence``, or the sequence ratio with a gradient per token "
        "(``sequence_token``, for advantages that differ between tokens). GSPO and GSPO-token are these with "
        "``loss_type: grpo``, ``epsilon: 3e-4`` and ``epsilon_high: 4e-4``",
        one_of=("token", "sequence", "sequence_token"),
    )
    kl_estimator: str = setting(
        default="k3",
        says="``k1``, ``k2`` or ``k3``; the expected gradient of k1 is 0, see ``functional.kl_estimate``",
        one_of=("k1", "k2", "k3"),
    )
    use_bias_correction_kl: bool = setting(
        default=True, says="multiply the estimate by ρ: with k3 its gradient is then that of KL(π || π_ref)"
    )
    mask_truncated_completions: bool = setting(
        default=False, says="exclude truncated completions from the loss (DAPO's overlong filter)"
    )
    reward_to_go: bool = setting(
        default=False,
        says="of dialogues: advantage of each turn from what it and later turns earn, in place of the dialogue's "
        "reward; the baseline is that of the group's returns from the same turn on",
    )
    turn_gamma: float = setting(
        default=1.0,
        says="γ of ``reward_to_go``, per turn; -1: the turns alternate between two players, and what one earns "
        "the other loses",
        least=-1,
        most=1,
        idle=lambda m: not m.reward_to_go and "without reward_to_go=true; set that",
    )
    top_entropy_quantile: float = setting(
        default=1.0,
        says="share of the tokens that the policy loss keeps: those with the highest entropies of a micro-batch over "
        "all ranks (Wang et al. 2025, arXiv:2506.01939: 0.2). The others still count in the KL term and in the number "
        "of tokens that the loss is divided by. 1: all",
        above=0,
        most=1,
    )
    entropy_coef: float = setting(
        default=0.0,
        says="weight of the entropy bonus, in units of advantage per nat: the mean entropy of the tokens' "
        "distributions, over the tokens of ``top_entropy_quantile``. 0: none",
        least=0,
    )
    importance_sampling_correction: str | None = setting(
        default=None,
        says="weight of each token if the sampler's probabilities differ from training's, with ρ = π_training / "
        "π_sampler: ``token_truncate`` or ``sequence_truncate`` (ρ of each token, or of the whole completion, clipped "
        "to the bounds), ``token_mask`` or ``sequence_mask`` (0 outside of the bounds), or ``none``. Null: ``none`` "
        "for ``native``; for a sampler on another engine and under ``async_generations`` ``sequence_mask``, or "
        "``token_truncate`` if the sampler does not return the tokens that its filters kept",
        one_of=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    importance_sampling_clip_min: float | None = setting(
        default=None, says="lower bound on ρ; null: none", least=0, idle=without_correction
    )
    importance_sampling_clip_max: float | None = setting(
        default=3.0, says="upper bound on ρ; null: none", least=0, idle=without_correction
    )
    max_completion_length = 512
    learning_rate = 1e-6

    learning_curve = "train/reward"

    learns_from = "prompts"
    balances_experts = True
    takes_images = True
    #: Whether the loss has a part of the datamodule's demonstrations, ``ptx_tokens``, as RLHFPPO's has.
    reads_demonstrations = False
    #: Whether a token may have an importance weight of its own.
    weights_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise UsageError(
                "epsilon_high=None leaves loss_type='cispo' without its bound on the importance weight; give one, such "
                "as 5"
            )
        if low is not None and high is not None and low > high:
            raise UsageError(
                f"importance_sampling_clip_min={low} must not be above importance_sampling_clip_max={high}"
            )
        if self.advantage_function is not None:
            self.advantage_function = load_argument(self)

    @property
    def wants_reference(self) -> bool:
        return self.beta > 0

    #: Whether the loss reads the entropies of the tokens' distributions.
    wants_entropy = property(lambda self: self.top_entropy_quantile < 1 or self.entropy_coef > 0)

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if stage == "fit":
            self._check_groups()
            if type(self).rewards is GRPO.rewards:
                self.require_rewards()

    def _check_groups(self) -> None:
        """Refuses groups of one completion where the baseline is the group's; warns of a level that is not GSPO's."""
        is_own = type(self).advantages is not GRPO.advantages or type(self).score_group is not GRPO.score_group
        compares = not is_own and (self.advantage_function is None or self.advantage_function in IN_GROUPS)
        if compares and getattr(getattr(self.trainer, "datamodule", None), "num_generations", 2) < 2:
            raise UsageError("num_generations=1 leaves a completion nothing to be compared with; give at least 2")
        if self.importance_sampling_level != "token" and self.loss_type != "grpo":
            rank_zero_warn(
                f"importance_sampling_level={self.importance_sampling_level!r} with loss_type={self.loss_type!r} is "
                "not GSPO, which averages over sequences: GSPO is loss_type='grpo' with epsilon=3e-4 and "
                "epsilon_high=4e-4"
            )

    def check_architecture(self) -> None:
        super().check_architecture()
        can_share(self.model, 0)

    # ---------------------------------------------------------------- experience

    rewards = PolicyWithReference.combined_rewards

    def prepare(self, rollout: Rollout) -> dict[str, Tensor]:
        """Computes advantages and masks of a scored rollout.

        Returns:
            The fields that :meth:`training_step` reads: tokens [B, T]; prompt_length, length, group and advantage [B];
            mask, log_prob and, if β > 0, ref_log_prob [B, L]; sampling_log_prob and importance_weight [B, L] if the
            loss is corrected for the sampler; keep [B] bool if rows without advantage skip the forward pass.
        """
        mask = written_mask(rollout)
        filtered = self.filter_of(rollout)
        if self.mask_truncated_completions:
            mask = mask & rollout["finished"].unsqueeze(1)
        names = ("tokens", "prompt_length", "length", "log_prob", "kept", "kept_count")
        fields = {**{name: rollout[name] for name in names if name in rollout}, "mask": mask}
        fields["group"] = torch.arange(len(mask), device=mask.device) // rollout["num_generations"]
        everyone = self.gathered(rollout["reward"])
        if self.advantage_function is not None and reads_each_function(self.advantage_function):
            advantage = scores_of_each(self, self.advantage_function, rollout)
        else:
            advantage = self.advantages(everyone, rollout["num_generations"])
        own = slice(self.global_rank * len(mask), (self.global_rank + 1) * len(mask))
        fields["advantage"] = require_advantages(advantage, everyone, mask.shape[1])[own]
        if self.reward_to_go:
            fields["advantage"] = turn_advantages(self, rollout)
        passes = rollout.get("passes", {})
        if "passes" not in rollout and (self.rescores or self.beta):
            passes = in_parts(self.forward_rows, rollout, self.evaluate_completions, filtered)
        fields |= {name: passes[name] for name in passes if name != "entropy"}
        if self.correction != "none":
            fields |= importance_weights(self, fields, rollout["log_prob"])
        if self.beta == 0 and not self.wants_entropy:
            matters = fields["advantage"] != 0
            fields["keep"] = mask.any(1) & (matters.any(1) if matters.ndim == 2 else matters)
        record_generation(self, rollout, fields, passes.get("entropy"))
        return fields

    def advantages(self, reward: Tensor, num_generations: int) -> Tensor:
        """Returns A of each completion, [B] (or [B, L] if tokens differ).

        Args:
            reward: of the generation's completions over all ranks, [B]; NaN: not scored.
            num_generations: completions per prompt, which are adjacent.
        """
        return self.score_group(reward.view(-1, num_generations)).flatten()

    def score_group(self, rewards: Tensor) -> Tensor:
        """Returns A of the completions of each prompt; algorithms with another baseline or scale override it.

        Args:
            rewards: a row for each prompt's group over all ranks, [P, G]; NaN: not scored.

        Returns:
            [P, G]; 0 where nothing was scored.
        """
        if self.advantage_function is not None:
            return scores_by(self.advantage_function, rewards, self.hparams.get("advantages"))
        return F.group_advantages(rewards.flatten(), rewards.shape[1], self.scale_rewards).view_as(rewards)

    # ---------------------------------------------------------------- log-probabilities

    def evaluate_completions(
        self, tokens: Tensor, prompt_length: Tensor, length: Tensor, filtered: Any = None, images: Any = None
    ) -> dict[str, Tensor]:
        """Runs the forward passes that a generation needs: log π and entropy, and log π_ref, [b, L] each."""
        text = (tokens, prompt_length, length)
        result: dict[str, Any] = {}
        if self.rescores:
            found = completion_log_probs(self.model, *text, self.temperature, True, filtered=filtered, images=images)
            result = dict(zip(("log_prob", "entropy"), found, strict=True))
        if self.beta:
            self.sync_reference()
            result["ref_log_prob"] = reference_log_probs_of(self, *text, filtered, images)
        return result

    def log_probs(self, batch: dict[str, Any], entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Returns log π of the completions' tokens and, with ``entropy``, their entropies, [b, L]."""
        text = (batch["tokens"], batch["prompt_length"], batch["length"])
        filtered = self.filter_of(batch)
        # The routers' loss counts each row's tokens, which rows then don't share; nor do they share images.
        images = batch.get("images")
        group = None if images is not None or wants_router_loss(self.model) else batch.get("group")
        shared = shared_log_probs(self.model, *text, group, self.temperature, entropy, filtered)
        return shared or completion_log_probs(
            self.model, *text, self.temperature, entropy, extent_in(batch), filtered, images
        )

    @property
    def correction(self) -> str:
        """The mode of the importance weights: the given one, or TRL's default, unless the kept tokens are unknown."""
        given: str | None = self.importance_sampling_correction
        if given is not None:
            return given
        if self.lacks_support:
            return "token_truncate" if self.weights_tokens else "none"
        return "none" if self.sampler_name == "native" and not self.samples_ahead else "sequence_mask"

    @property
    def rescores(self) -> bool:
        """Whether log-probabilities are computed again: the sampler's differ by engine, unknown filters or rounding."""
        if self.correction != "none" or self.sampler_name != "native" or self.lacks_support:
            return True
        if self._trainer is None:  # its loss is computed alone, with the log-probabilities of the batch
            return False
        exact = self.trainer.precision in ("32-true", "64-true") and self.torch_dtype == "float32"
        return self.compares_with_sampler and not exact

    @property
    def compares_with_sampler(self) -> bool:
        """Whether the ratio compares the sampler's log-probabilities with a forward pass's: from the second update."""
        return bool(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches > 1)

    # ---------------------------------------------------------------- one minibatch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if wants_router_loss(self.model):
            with router_logits(self.model) as routers:
                log_prob, entropy = self.log_probs(batch, entropy=self.wants_entropy)
            balance = completions_router_loss(self, routers[-1], batch)
        else:
            (log_prob, entropy), balance = self.log_probs(batch, entropy=self.wants_entropy), None
        if batch["on_policy"]:
            # The weights are the same, so only the rounding of another batch size could make the stored values differ.
            batch = {**batch, "log_prob": log_prob.detach()}
        if entropy is None:
            loss = self.policy_loss(log_prob, batch)
        else:
            if not self.rescores:  # else the generation's pass has recorded it
                spread = F.masked_mean(entropy.detach(), batch["mask"])
                self.record(batch["mask"].sum(), entropy=spread)
            batch, bonus = entropy_terms(self, entropy, batch)
            loss = self.policy_loss(log_prob, batch) - bonus
        self.record_minibatch(log_prob.detach(), loss.detach(), batch)
        return loss if balance is None else loss + balance

    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns this micro-batch's part of the step's loss, times their number, by which Lightning divides.

        Args:
            log_prob: of the completions' tokens, [b, L].
            batch: a minibatch; skipped rows have loss 0 and count in the normalisers.
        """
        loss = F.grpo_loss(
            log_prob,
            batch["log_prob"],
            batch["advantage"],
            batch["mask"],
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            beta=self.beta,
            ref_log_prob=batch.get("ref_log_prob"),
            kl_estimator=self.kl_estimator,
            use_bias_correction_kl=self.use_bias_correction_kl,
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            max_completion_length=self.max_completion_length,
            num_items_in_batch=batch["step_tokens"],
            importance_weight=batch.get("importance_weight"),
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
        )
        if self.loss_type in ("dapo", "cispo"):
            return loss * batch["n_micro"]
        if self.loss_type == "bnpo":
            return loss * (batch["mask"].sum() / batch["micro_tokens"].clamp(min=1))
        return loss * (len(log_prob) * batch["n_micro"] / batch["step_rows"])

    # ---------------------------------------------------------------- diagnostics

    @torch.no_grad()
    def record_minibatch(self, log_prob: Tensor, loss: Tensor, batch: dict[str, Any]) -> None:
        """Records the loss, the fractions of clipped ratios, and the KL to the reference."""
        self.record(loss=loss)
        record_clipping(self, log_prob, batch)
        if self.beta:
            kl = F.kl_estimate(log_prob, batch["ref_log_prob"], self.kl_estimator)
            self.record(batch["mask"].sum(), kl=F.masked_mean(kl, batch["mask"]))
