"""Reinforcement learning from human feedback with proximal policy optimization."""

from typing import Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules import ranks
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import changed, fixed, setting
from rl_modules.core.state import persistent
from rl_modules.language.completion_metrics import length_metrics, record_completions, table_is_due
from rl_modules.language.critics import HeadOnPolicy, token_values, value_model_from, value_model_from_policy
from rl_modules.language.fast.early_gradient import loss_of
from rl_modules.language.judges import reference_log_probs_of
from rl_modules.language.models import adapters_of
from rl_modules.language.policy_with_reference import PolicyWithReference, Rollout
from rl_modules.language.sampling.support import Filter
from rl_modules.language.scoring import (
    Extent,
    completion_log_probs,
    completion_mask,
    extent_in,
    extent_of,
    in_parts,
    log_probs_at,
    written_mask,
)
from rl_modules.language.tokenizer import check_same_tokens


class RLHFPPO(PolicyWithReference):
    """RLHF with PPO: maximises the score of a reward model or of verifiers minus a KL penalty to a reference policy.

    Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155; details from Huang et al. 2024,
    arXiv:2403.17031. A completion is an episode, a token an action:

        r_t = -β (log π - log π_ref)_t,   plus the score on the last token;   A = GAE(γ, λ),  R = A + V

        L = -E[min(ρA, clip(ρ, 1-ε, 1+ε)A)] + vf_coef·½E[max((V-R)², (V_clip-R)²)] - ptx_coef·E[log π(x)]

    E is the mean over all completion tokens of the optimizer step, over micro-batches and ranks. The
    score is a reward model's, or that of the datamodule's ``reward_funcs`` as in :class:`~rl_modules.GRPO`, or a sum of
    both. The value model starts as a copy of the reward model; without one, as a copy of the policy's body with a head
    initialised to 0. A checkpoint holds the models that train; of frozen ones that were read from a path it holds the
    path and a digest, unless ``save_frozen_weights`` is set.

    Names and defaults are those of TRL's PPO, with two exceptions that follow GRPO: ``beta`` is TRL's ``kl_coef``,
    and ``max_completion_length`` TRL's ``response_length`` (whose default is 53). Departures from it: the score is the
    reward of the completion's last token (TRL: of the next position), and whitening is over all ranks.
    """

    value_head_on_policy: bool = setting(
        default=False,
        says="V is a linear head on the policy's last hidden states (0 at first) instead of a separate model: half "
        "the memory, but both losses train the same weights",
    )
    initial_beta: float = setting(
        default=0.05,
        says="β, weight of the KL to the reference, in units of score per nat. At 0 a reference is loaded, and the KL "
        "measured, only with ``ref_model_name_or_path``",
        least=0,
        alias="beta",
    )
    target_kl: float | None = setting(
        default=None,
        says="target of the adaptive β, in nats per completion (Ziegler et al.); None: β is constant",
        above=0,
        idle=lambda m: m.initial_beta == 0 and "with beta=0, which stays 0; set that above 0",
    )
    kl_gain: float = setting(
        default=0.1,
        says="gain of the controller; the largest relative change of β per generation is a fifth of it",
        least=0,
        below=5,
        idle=lambda m: m.target_kl is None and "without target_kl; set that",
    )
    kl_estimator: str = setting(
        default="k1",
        says="``k1`` (the log-ratio) or ``k3`` (never negative, but with another optimum)",
        one_of=("k1", "k3"),
    )
    gamma: float = setting(default=1.0, says="discount γ per token", least=0, most=1)
    lam: float = setting(default=0.95, says="λ of generalized advantage estimation", least=0, most=1)
    cliprange: float = setting(default=0.2, says="ε of the policy's ratio", least=0)
    cliprange_value: float | None = setting(
        default=0.2, says="ε of the value, in units of score; None: no clipping", least=0
    )
    vf_coef: float = setting(default=0.1, says="weight of the value loss", least=0)
    whiten_advantages: bool = setting(
        default=True, says="scale and shift advantages over a generation's tokens to variance 1 and mean 0"
    )
    whiten_rewards: bool = setting(default=False, says="scale the tokens' rewards to variance 1 and keep their mean")
    missing_eos_penalty: float | None = setting(
        default=None, says="subtracted from the score of completions without EOS, in units of score; None: 0", least=0
    )
    ptx_coef: float = setting(
        default=0.0,
        says="weight of the demonstrations' negative log-likelihood per token (PPO-ptx); they come with the "
        "datamodule's ``ptx_batch_size``",
        least=0,
    )
    model_name_or_path = changed(says="the policy to start from, as supervised fine-tuning exports it")
    reward_model_name_or_path: str | None = changed(
        says="exported directory or checkpoint of a RewardModel; with another tokenizer than the policy's only under "
        "``value_head_on_policy``, because the value model starts from it. None: only the datamodule's reward "
        "functions"
    )
    reward_weights: list[float] | None = changed(
        says="one per reward function, the reward model's last. None: with a reward model, its score only (reward "
        "functions are logged); without one, all 1"
    )
    sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps = fixed(False), fixed(), fixed()
    learning_rate: float = changed(default=3e-6, says="peak step size, of the value model too")

    #: β at the moment, which changes under ``target_kl``; a run that resumes with another argument starts from that.
    beta: float = persistent(lambda module: module.initial_beta, argument="beta")

    learning_curve = "train/objective/scores"

    learns_from = "prompts"
    #: Whether reward functions may return a list of numbers for a completion, one per token.
    takes_token_rewards = True
    adam_eps = 1e-5
    score_metric = "eval/scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.value_model: Any = None
        self.value_head: HeadOnPolicy | None = None

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        if stage == "fit" and type(self).rewards is RLHFPPO.rewards:
            self.require_rewards()

    # ---------------------------------------------------------------- models

    @property
    def wants_reference(self) -> bool:
        return self.hparams["beta"] > 0 or self.ref_model_name_or_path is not None

    def build_model(self, config: Any, source: Any) -> None:
        """Builds policy, reference, reward model, and the value model or head."""
        super().build_model(config, source)
        if self.value_head_on_policy:
            self.value_head = HeadOnPolicy(self.model.get_output_embeddings().weight.shape[1])
        else:
            if self.reward_tokenizer is not None:
                check_same_tokens(
                    f"reward_model_name_or_path={self.reward_model_name_or_path!r}, from which the value "
                    "model starts (value_head_on_policy=true has none),",
                    self.reward_tokenizer,
                    self.tokenizer,
                )
            start = value_model_from_policy if self.reward_model is None else value_model_from
            source = self.model if self.reward_model is None else self.reward_model
            self.value_model = start(source, self.gradient_checkpointing, adapters_of(self))

    def frozen_arguments(self) -> dict[str, str]:
        arguments = super().frozen_arguments()
        name = "model_name_or_path" if self.reward_model is None else "reward_model_name_or_path"
        if self.value_model is not None and self.lora is not None and self.hparams[name] is not None:
            arguments["value_model."] = name
        return arguments

    # ---------------------------------------------------------------- experience

    def rewards(self, rollout: Rollout) -> Tensor:
        """Returns the reward of each completion, [B], or of each token, [B, L].

        The default is the weighted sum of the reward functions' values and the reward model's score, minus the penalty
        for a missing EOS. Where a reward function returns one number per token, each is the reward of its token; the
        rest is the reward of the last token. NaN excludes a completion from the losses.

        Args:
            rollout: see :class:`~rl_modules.language.contract.Generation`.
        """
        judges_alone = self.reward_model is not None and self.reward_weights is None
        by_token = None if judges_alone else rollout.get("token_rewards")
        score = self.reward_model_scores(rollout) if judges_alone else self.combined_rewards(rollout)
        late = torch.zeros_like(score)
        if self.missing_eos_penalty is not None:
            late = -self.missing_eos_penalty * (~rollout["finished"]).float()
        if by_token is None:
            return score + late
        weights = self.reward_weights or [1.0] * rollout["rewards"].shape[1]
        if self.reward_model is not None:
            late = late + weights[-1] * rollout["rewards"][:, -1]
        weight = torch.tensor(weights[: by_token.shape[-1]], dtype=by_token.dtype).to(by_token.device)
        earned = (by_token * weight).sum(-1)
        row = torch.arange(len(earned), device=earned.device)
        earned[row, rollout["length"] - 1] += late
        return earned.masked_fill(score.isnan().unsqueeze(1), torch.nan)

    def prepare(self, rollout: Rollout) -> dict[str, Tensor]:
        """Computes token rewards, advantages and returns of a scored rollout.

        Returns:
            The fields that :meth:`training_step` reads: tokens [B, T], prompt_length and length [B]; mask, log_prob,
            value, advantage and returns [B, L].
        """
        mask = written_mask(rollout)
        earned = rollout["reward"].unsqueeze(1) if rollout["reward"].ndim == 1 else rollout["reward"]
        mask = mask & ~(earned.isnan() & (mask | (earned.shape[1] == 1))).any(1, keepdim=True)
        rollout = {**rollout, "reward": rollout["reward"].nan_to_num(nan=0.0), "mask": mask}
        rollout |= in_parts(self.forward_rows, rollout, self.evaluate_completions, self.filter_of(rollout))
        reward = self.token_rewards(rollout)
        advantage = self.advantages(reward, rollout["value"], mask)
        returns = torch.where(mask, advantage + rollout["value"], 0.0)
        if self.whiten_advantages:
            advantage = self.whiten(advantage, mask)
        self.record_generation(rollout, returns)
        names = ("tokens", "prompt_length", "length", "mask", "log_prob", "value", "kept", "kept_count")
        return {
            **{name: rollout[name] for name in names if name in rollout},
            "advantage": advantage,
            "returns": returns,
        }

    def evaluate_completions(
        self, tokens: Tensor, prompt_length: Tensor, length: Tensor, filtered: Filter | None = None
    ) -> dict[str, Tensor]:
        """Returns log π, V, entropy and, with a reference, log π_ref of the tokens, [b, L], in training precision."""
        text = (tokens, prompt_length, length)
        log_prob, value, entropy = self.policy_and_value(*text, entropy=True, filtered=filtered)
        found = {"log_prob": log_prob, "value": value, "entropy": entropy}
        return (
            {**found, "ref_log_prob": reference_log_probs_of(self, *text, filtered)} if self.wants_reference else found
        )

    def policy_and_value(
        self,
        tokens: Tensor,
        prompt_length: Tensor,
        length: Tensor,
        entropy: bool = False,
        extent: Extent | None = None,
        filtered: Filter | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns log π and V of the completions' tokens and, with ``entropy``, the entropies, [b, L] each."""
        text = (tokens, prompt_length, length)
        extent = extent_of(prompt_length, length) if extent is None else extent
        if self.value_head is None:
            log_prob, spread = completion_log_probs(self.model, *text, self.temperature, entropy, extent, filtered)
            return log_prob, self.values(*text, extent), spread
        log_prob, spread, value = self.value_head(self.model, *text, self.temperature, entropy, extent, filtered)
        return log_prob, torch.where(completion_mask(length, extent[2]), value, 0.0), spread

    def values(self, tokens: Tensor, prompt_length: Tensor, length: Tensor, extent: Extent) -> Tensor:
        """Returns the value model's V of the completions' tokens, [b, L]."""
        value = token_values(self.value_model, tokens, prompt_length, length, extent[2]) - self.reward_offset
        return torch.where(completion_mask(length, extent[2]), value, 0.0)

    # ---------------------------------------------------------------- optimization

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        text = (batch["tokens"], batch["prompt_length"], batch["length"])
        extent, filtered = extent_in(batch) or extent_of(*text[1:]), self.filter_of(batch)
        # Means over this micro-batch become parts of the mean over the step; Lightning divides by their number.
        share = batch["mask"].sum() / batch["step_tokens"].clamp(min=1) * batch["n_micro"]
        if self.value_head is None and type(self).policy_and_value is RLHFPPO.policy_and_value:
            weighted_value_loss, value_loss, value = loss_of(
                self,
                lambda: self.values(*text, extent),
                lambda value: self.value_loss(value, batch),
                share * self.vf_coef,
            )
            log_prob, _ = completion_log_probs(self.model, *text, self.temperature, False, extent, filtered)
        else:
            log_prob, value, _ = self.policy_and_value(*text, extent=extent, filtered=filtered)
            value_loss = self.value_loss(value, batch)
            weighted_value_loss = share * self.vf_coef * value_loss
        if batch["on_policy"]:
            # The weights are the same, so only the rounding of another batch size could make the stored values differ.
            batch = {**batch, "log_prob": log_prob.detach()}
        policy_loss = self.policy_loss(log_prob, batch)
        loss = share * policy_loss + weighted_value_loss
        self.record_minibatch(log_prob.detach(), value.detach(), policy_loss, value_loss, batch)
        if self.ptx_coef or "ptx_tokens" in batch:
            loss = loss + self.ptx_coef * self.demonstration_loss(batch)
        return loss

    def policy_loss(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns the clipped surrogate, mean over the counted tokens."""
        return F.ppo_clip_loss(log_prob, batch["log_prob"], batch["advantage"], self.cliprange, batch["mask"])

    def value_loss(self, value: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns half the mean squared error to the returns, clipped around the old value."""
        return F.value_loss(value, batch["returns"], batch["value"], self.cliprange_value, batch["mask"])

    def demonstration_loss(self, batch: dict[str, Any]) -> Tensor:
        """-E[log π(x)] per token of the demonstrations in the batch, at temperature 1, as its part of the step's mean.

        Raises:
            UsageError: ptx_coef without demonstrations, or demonstrations without ptx_coef.
        """
        if "ptx_tokens" not in batch:
            raise UsageError(
                f"ptx_coef={self.ptx_coef} needs demonstrations in every step; give the datamodule a "
                "ptx_batch_size above 0"
            )
        if not self.ptx_coef:
            raise UsageError(
                "ptx_batch_size brings demonstrations, but ptx_coef=0 makes nothing of them; set both or neither"
            )
        tokens, counted = batch["ptx_tokens"], batch["ptx_counted"]
        found = log_probs_at(self.model, counted - 1, tokens.flatten()[counted], equal_weights=True, input_ids=tokens)
        loss = -found.log_prob.sum() / batch["ptx_step_tokens"] * batch["n_micro"]
        self.record(**{"loss/ptx_avg": loss})
        return loss

    # ---------------------------------------------------------------- pieces to override

    def token_rewards(self, rollout: Rollout) -> Tensor:
        """Returns r_t, [B, L]: the KL penalty, plus the reward on the last token or the given token rewards."""
        mask, earned = rollout["mask"], rollout["reward"]
        kl = self.paid_kl(rollout)
        at_the_end = earned if earned.ndim == 1 else torch.zeros_like(earned[:, 0])
        # For k1 this is log π - log π_ref itself.
        reward = F.rlhf_rewards(at_the_end, kl, torch.zeros_like(kl), mask, self.beta)
        if earned.ndim == 2:
            reward = reward + torch.where(mask, earned, 0.0)
        return self.whiten(reward, rollout["mask"], shift_mean=False) if self.whiten_rewards else reward

    def paid_kl(self, rollout: Rollout) -> Tensor:
        """Returns the estimate of the penalised KL to the reference, [B, L]; 0 without a reference."""
        if "ref_log_prob" not in rollout:
            return torch.zeros_like(rollout["log_prob"])
        return F.kl_estimate(rollout["log_prob"], rollout["ref_log_prob"], self.kl_estimator)

    def advantages(self, reward: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """A of every token, [B, L]: GAE over each completion; a turn's last state is the next turn's first."""
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # the tokens that count, one after the other
            found = self.advantages(*(x.gather(1, order) for x in (reward, value, mask)))
            return torch.zeros_like(found).scatter(1, order, found)
        following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        last = mask & ~following
        next_value = torch.nn.functional.pad(value[:, 1:], (0, 1))
        never = torch.zeros_like(last)
        advantage = F.gae(reward.T, value.T, next_value.T, (last | ~mask).T, never.T, self.gamma, self.lam).T
        return torch.where(mask, advantage, 0.0)

    def whiten(self, x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        """``F.masked_whiten`` over the completions of all ranks, [B, L]."""
        width = self.most_over_ranks(x.shape[1])
        everyone = [self.gathered(torch.nn.functional.pad(y, (0, width - x.shape[1]))) for y in (x, mask)]
        own = slice(self.global_rank * len(x), (self.global_rank + 1) * len(x))
        return F.masked_whiten(everyone[0], everyone[1], shift_mean)[own, : x.shape[1]]

    # ---------------------------------------------------------------- diagnostics, the price of KL

    def record_generation(self, rollout: Rollout, returns: Tensor) -> None:
        """Records rewards, lengths and the KL to the reference of a generation; adapts β to that KL."""
        mask, log_prob = rollout["mask"], rollout["log_prob"]
        has_reference = "ref_log_prob" in rollout
        distance = log_prob - rollout["ref_log_prob"] if has_reference else torch.zeros_like(log_prob)
        paid = self.paid_kl(rollout)
        summed = [torch.where(mask, x, 0.0).sum(1) for x in (distance, paid, rollout["entropy"])]
        earned = rollout["reward"]
        if earned.ndim == 2:
            earned = torch.where(mask, earned, 0.0).sum(1)
        scored = mask.any(1)
        columns = (scored, earned, *summed)
        counts, score, kl, paid, entropy, length, finished = record_completions(self, rollout, *columns, std=False)
        non_score = -self.beta * paid
        explain = F.explained_variance if self._world_size == 1 else ranks.explained_variance
        explained = explain(rollout["value"][mask], returns[mask])
        metrics: dict[str, Tensor | float] = {
            "val/num_eos_tokens": finished.sum(),
            "val/explained_variance": explained.nan_to_num(),
            **length_metrics(length, finished),
            "beta": self.beta,
        }
        self.record(**metrics)
        # Of the completions that the losses count.
        objective = {
            **({"kl": kl} if has_reference else {}),
            "entropy": entropy,
            "non_score_reward": non_score,
            "rlhf_reward": score + non_score,
            "scores": score,
        }
        means = {f"objective/{name}": F.masked_mean(x, counts) for name, x in objective.items()}
        self.record(counts.any().float(), **means)
        if self.target_kl is not None and bool(counts.any()):
            kl = F.masked_mean(kl, counts)
            self.beta = F.proportional_kl_coefficient(self.beta, kl, self.target_kl, self.kl_gain)
        if table_is_due(self):
            self.write_completions(rollout, score=earned.masked_fill(~scored, torch.nan), kl=summed[0])

    @torch.no_grad()
    def record_minibatch(
        self, log_prob: Tensor, value: Tensor, policy_loss: Tensor, value_loss: Tensor, batch: dict[str, Any]
    ) -> None:
        """Records losses, ratios, and the fractions of clipped ratios and values."""
        mask, advantage = batch["mask"], batch["advantage"]
        log_ratio = torch.where(mask, log_prob - batch["log_prob"], 0.0)
        ratio = log_ratio.exp()
        binds = ratio * advantage > ratio.clamp(1 - self.cliprange, 1 + self.cliprange) * advantage
        metrics = {
            "loss/policy_avg": policy_loss,
            "loss/value_avg": value_loss,
            "policy/approxkl_avg": F.masked_mean(0.5 * log_ratio.square(), mask),
            "policy/clipfrac_avg": F.masked_mean(binds.float(), mask),
            "val/ratio": F.masked_mean(ratio, mask),
        }
        if self.cliprange_value is not None:
            moved = (value - batch["value"]).abs() > self.cliprange_value
            metrics["val/clipfrac_avg"] = F.masked_mean(moved.float(), mask)
        self.record(mask.sum(), **metrics)

    def log_completions(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs evaluation metrics, with held-out completions' scores and their KL to the reference."""
        super().log_completions(batch, batch_idx)
        if self.wants_reference:
            passes = in_parts(self.forward_rows, batch, self.evaluate_completions)
            distance = passes["log_prob"] - passes["ref_log_prob"]
            kl = torch.where(batch.get("written", distance == distance), distance, 0.0).sum(-1).mean()
            self.log_evaluation({"eval/kl": kl}, len(batch["answers"]))
