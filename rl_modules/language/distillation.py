"""Distillation: a student learns a teacher's distribution of each token, on its own completions or on given ones."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import fixed, setting
from rl_modules.language.architecture import text_config
from rl_modules.language.completion_metrics import length_metrics, moments, record_completions, table_is_due
from rl_modules.language.fast.packing import can_pack_texts, packed_inputs
from rl_modules.language.judges import reference_log_probs_of
from rl_modules.language.policy_with_reference import PolicyWithReference, Rollout
from rl_modules.language.sampling.support import Filter
from rl_modules.language.sampling.teacher import ServedTeacher
from rl_modules.language.scoring import (
    completion_log_probs,
    completion_mask,
    extent_in,
    in_parts,
    logits_by_tiles,
    written_mask,
)


class Distillation(PolicyWithReference):
    """Distillation of a teacher p into the policy q, the student, token by token.

    Agarwal et al. 2024, arXiv:2306.13649 (GKD). Per optimizer step, over its N tokens that count,

        L = 1/N Σ_t D(p(·|x, y_<t), q(·|x, y_<t))

    with D by ``beta``: forward KL(p ‖ q) at 0, reverse KL(q ‖ p) at 1, the generalized Jensen–Shannon divergence else.
    With ``PromptDataModule`` y are the student's completions (on-policy), through whose sampling no gradient flows;
    with ``InstructionDataModule`` y are demonstrations (off-policy). ``PromptDataModule(ptx_batch_size=…)`` has both,
    weighted ``lmbda`` and 1 - ``lmbda``, where GKD chooses one of them at random with these probabilities.

    ``distillation_objective: policy_gradient`` maximises the teacher's log-ratio log p(y_t) - log q(y_t), a reward per
    token, by the clipped policy gradient. Its expected gradient on-policy is that of the reverse KL, from the sampled
    tokens' probabilities alone.

    Names and defaults are those of TRL 1.16's ``DistillationTrainer`` and, for ``lmbda`` and ``loss_top_k``, of its
    relatives. Departure from it: ``gradient_checkpointing`` is off by default (TRL: on).
    """

    teacher_model_name_or_path: str | None = setting(
        default=None,
        says="the teacher: an exported directory, a hub name, or a language algorithm's checkpoint (``.ckpt``), with "
        "the student's tokenizer. None: under ``lora`` the model without adapters",
    )
    teacher_model_server_url: str | None = setting(
        default=None,
        says="in place of a local teacher, host:port of `rl serve --model DIRECTORY`, which answers with the "
        "``loss_top_k`` likeliest tokens of each place, at most 1024, at ``temperature: 1``",
    )
    beta: float = setting(
        default=1.0,
        says="β, the divergence: 0 forward KL, 1 reverse KL, between them the generalized Jensen–Shannon divergence",
        least=0,
        most=1,
    )
    lmbda: float = setting(
        default=1.0,
        says="λ, weight of the student's completions where a step also has demonstrations, whose weight is 1 - λ",
        least=0,
        most=1,
    )
    loss_top_k: int = setting(
        default=0, says="compare the teacher's k likeliest tokens only; 0: the whole vocabulary", least=0
    )
    loss_add_tail: bool = setting(
        default=True,
        says="the probability of all other tokens counts as one more token; false: the k tokens' probabilities are "
        "divided by their sum",
        idle=lambda m: not m.loss_top_k and "without loss_top_k; set that",
    )
    distillation_objective: str = setting(
        default="jsd",
        says="``jsd``: the divergence of ``beta`` between distributions; ``policy_gradient``: the teacher's log-"
        "ratio of each sampled token as its reward",
        one_of=("jsd", "policy_gradient"),
    )
    epsilon: float = setting(
        default=0.2,
        says="ε, how far the ratio to the policy that sampled may move from 1",
        least=0,
        idle=lambda m: (
            m.distillation_objective != "policy_gradient"
            and "without distillation_objective='policy_gradient'; set that"
        ),
    )
    max_completion_length = 512
    learning_rate = 1e-6
    ref_model_name_or_path = fixed(None, instead="teacher_model_name_or_path names the teacher")
    reward_model_name_or_path = fixed(None, instead="the teacher gives the reward")
    sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps = fixed(False), fixed(), fixed()

    reference_argument = "teacher_model_name_or_path"
    learns_from = ("prompts", "demonstrations")
    reads_demonstrations = True
    learning_curve = "train/loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._served: Any = None
        url = self.teacher_model_server_url
        if url is not None and (
            self.teacher_model_name_or_path is not None
            or not 0 < self.loss_top_k <= 1024
            or self.distillation_objective != "jsd"
            or self.temperature != 1
        ):
            raise UsageError(
                f"teacher_model_server_url={url!r} takes loss_top_k from 1 to 1024, distillation_objective='jsd', "
                "temperature=1 (vLLM scores texts at no other) and no teacher_model_name_or_path"
            )
        if self.teacher_model_name_or_path is None and self.lora is None and url is None:
            raise UsageError(
                "teacher_model_name_or_path=None leaves no teacher without lora, whose base it would be; "
                "give a directory, hub name or checkpoint"
            )

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        shown = getattr(data, "ptx_batch_size", None)
        if stage == "fit" and shown is not None and (shown > 0) != (self.lmbda < 1):
            raise UsageError(
                f"lmbda={self.lmbda} with ptx_batch_size={shown}: demonstrations have the weight 1 - "
                "lmbda; set lmbda below 1 and ptx_batch_size above 0, or neither"
            )
        if stage == "fit" and shown is None and self.distillation_objective == "policy_gradient":
            raise UsageError(
                "distillation_objective='policy_gradient' needs the student's completions; take PromptDataModule"
            )

    @property
    def wants_reference(self) -> bool:
        return self.teacher_model_server_url is None

    @property
    def best_metric(self) -> tuple[str, str]:  # type: ignore[override]
        """The accuracy on held-out prompts or, without a reward function, the loss or the distance to the teacher."""
        data = getattr(self._trainer, "datamodule", None)
        if len(getattr(data, "rewards", ())) > 0:
            return ("eval/pass@1", "max")
        return ("eval/loss" if getattr(data, "kind", "") == "demonstrations" else "eval/reverse_kl", "min")

    @property
    def can_pack(self) -> bool:
        """Whether student and teacher keep several texts in a row apart."""
        if not self.wants_reference:
            return False  # texts are sent one by one
        with self.reference_model() as teacher:
            return can_pack_texts(self.model) and can_pack_texts(teacher)

    # ---------------------------------------------------------------- the divergence

    def divergence(self, place: Tensor, beta: float, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Returns D, and the reverse KL without gradient, of the distributions at places of a batch, [m] each, in nats.

        Args:
            place: ``row * width + column`` of the tokens that predict the compared ones, [m].
            beta: β.
            inputs: of both models: ``input_ids`` [rows, width] …
        """
        ours, size = logits_by_tiles(self.model, place, **inputs)
        words = text_config(self.model.config).vocab_size
        if self.wants_reference:
            with torch.no_grad(), self.reference_model() as teacher:
                read = {**inputs, "input_ids": self.readable(inputs["input_ids"])}
                theirs, other_size = logits_by_tiles(teacher, place, **read)
                # Models with one tokenizer may have vocabularies that are padded to different sizes.
                words = min(words, text_config(teacher.config).vocab_size)
            size = min(size, other_size)
        else:
            ids, likeliest = self.served_teacher.likeliest_at(place, inputs["input_ids"], words)

        def of(part: slice) -> Tensor:
            if self.wants_reference:
                with torch.no_grad(), self.reference_model():
                    log_p = (theirs(part)[0, :, :words].float() / self.temperature).log_softmax(-1)
            log_q = (ours(part)[0, :, :words].float() / self.temperature).log_softmax(-1)
            if not self.wants_reference:
                coarse = self.coarse(log_q.gather(-1, ids[part])), self.coarse(likeliest[part])
                return torch.stack(
                    [F.generalized_jsd(*coarse, beta), F.generalized_jsd(coarse[0].detach(), coarse[1], 1.0)]
                )
            return torch.stack(self.token_divergence(log_q, log_p, beta))

        parts = [slice(first, first + size) for first in range(0, max(1, len(place)), max(1, size))]
        found = (
            of(parts[0])
            if len(parts) == 1
            else torch.cat([checkpoint(of, part, use_reentrant=False) for part in parts], -1)
        )
        return found[0], found[1].detach()

    def readable(self, tokens: Tensor) -> Tensor:
        """Returns tokens with padding in place of those that only the student's larger vocabulary has.

        They are beyond the tokenizer's words, and stand for no text; a student with untrained rows may write them.
        """
        with self.reference_model() as teacher:
            known = text_config(teacher.config).vocab_size
        if known >= text_config(self.model.config).vocab_size:
            return tokens
        return tokens.where(tokens < known, int(self.tokenizer.pad_token_id))

    @property
    def served_teacher(self) -> Any:
        """The client of the teacher's server; the reverse KL from its likeliest tokens is a lower bound."""
        if self._served is None:
            address = cast(str, self.teacher_model_server_url)
            self._served = ServedTeacher(address, self.tokenizer, self.loss_top_k)
        return self._served

    def token_divergence(self, log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """Returns D of each token's distributions, and their reverse KL, from log-probabilities [..., V]."""
        with torch.no_grad():
            reverse = F.generalized_jsd(log_q, log_p, 1.0)
        if self.loss_top_k and self.loss_top_k < log_p.shape[-1]:
            likeliest = log_p.topk(self.loss_top_k).indices
            log_q, log_p = self.coarse(log_q.gather(-1, likeliest)), self.coarse(log_p.gather(-1, likeliest))
        return F.generalized_jsd(log_q, log_p, beta), reverse

    def coarse(self, log_prob: Tensor) -> Tensor:
        """Returns the distribution over k tokens, and over all others as one by ``loss_add_tail``."""
        return F.with_tail(log_prob) if self.loss_add_tail else log_prob.log_softmax(-1)

    def divergence_of_completions(self, batch: dict[str, Any], mask: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """:meth:`divergence` of the completion tokens under a mask [b, L]."""
        row, column = mask.nonzero(as_tuple=True)
        tokens = batch["tokens"]
        return self.divergence(row * tokens.shape[1] + batch["prompt_length"][row] + column - 1, beta, input_ids=tokens)

    # ---------------------------------------------------------------- experience

    def rewards(self, rollout: Rollout) -> Tensor:
        """Returns the weighted sum of the reward functions, for the curves, [B]; 0 without any."""
        if not rollout["reward_names"]:
            return torch.zeros(len(rollout["length"]), dtype=torch.float32, device=self.device)
        return self.combined_rewards(rollout)

    def prepare(self, rollout: Rollout) -> dict[str, Tensor]:
        """Returns the fields that :meth:`training_step` reads: tokens [B, T], prompt_length and length [B], mask
        [B, L]; for the policy gradient also log_prob, advantage and what filters kept.
        """
        mask = written_mask(rollout)
        names = ("tokens", "prompt_length", "length", "log_prob", "kept", "kept_count")
        fields = {**{name: rollout[name] for name in names if name in rollout}, "mask": mask}
        if self.distillation_objective == "policy_gradient":
            passes = in_parts(self.forward_rows, rollout, self.evaluate_completions, self.filter_of(rollout))
            fields["log_prob"] = passes["log_prob"]
            # The teacher has no probability of a token that it does not know.
            mask = fields["mask"] = mask & passes["known"]
            fields["advantage"] = F.distillation_advantage(passes["log_prob"], passes["teacher_log_prob"], mask)
            self.record(mask.sum(), reverse_kl=-F.masked_mean(fields["advantage"], mask))
        self.record_generation(rollout)
        return fields

    def evaluate_completions(
        self, tokens: Tensor, prompt_length: Tensor, length: Tensor, filtered: Filter | None = None
    ) -> dict[str, Tensor]:
        """Returns log q and log p of the completions' tokens, and whether the teacher knows them, [b, L] each."""
        where = (prompt_length, length)
        log_prob, _ = completion_log_probs(self.model, tokens, *where, self.temperature, filtered=filtered)
        read = self.readable(tokens)
        place = prompt_length.unsqueeze(1) + torch.arange(log_prob.shape[1], device=tokens.device)
        known = (read == tokens).gather(1, place.clamp(max=tokens.shape[1] - 1))
        return {
            "log_prob": log_prob,
            "teacher_log_prob": reference_log_probs_of(self, read, *where, filtered),
            "known": known,
        }

    # ---------------------------------------------------------------- one minibatch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if "counted" in batch:
            self.num_tokens += batch["num_tokens"]
            loss = self.demonstration_loss(batch["tokens"], batch["counted"], batch["step_tokens"], batch)
        else:
            share = batch["n_micro"] / batch["step_tokens"].clamp(min=1)
            loss = self.lmbda * share * self.completion_loss(batch)
            if self.lmbda < 1:
                tokens, counted = batch["ptx_tokens"], batch["ptx_counted"]
                shown = {"n_micro": batch["n_micro"]}
                demonstrated = self.demonstration_loss(tokens, counted, batch["ptx_step_tokens"], shown)
                loss = loss + (1 - self.lmbda) * demonstrated
        self.record(loss=loss.detach())
        return loss

    def completion_loss(self, batch: dict[str, Any]) -> Tensor:
        """Returns the sum over this micro-batch's tokens of the loss on the student's completions."""
        mask = batch["mask"]
        if self.distillation_objective == "jsd":
            divergence, reverse = self.divergence_of_completions(batch, mask, self.beta)
            self.record(mask.sum(), reverse_kl=reverse.sum() / mask.sum().clamp(min=1))
            return divergence.sum()
        text = (batch["tokens"], batch["prompt_length"], batch["length"])
        log_prob, _ = completion_log_probs(
            self.model, *text, self.temperature, extent=extent_in(batch), filtered=self.filter_of(batch)
        )
        old = log_prob.detach() if batch["on_policy"] else batch["log_prob"]
        return F.grpo_loss(
            log_prob, old, batch["advantage"], mask, epsilon=self.epsilon, loss_type="dapo", num_items_in_batch=1
        )

    def demonstration_loss(self, tokens: Tensor, counted: Tensor, total: Any, batch: dict[str, Any]) -> Tensor:
        """Returns this micro-batch's part of the mean divergence over the ``total`` tokens of the optimizer step."""
        divergence, reverse = self.divergence(counted - 1, self.beta, **self.inputs_of(tokens, batch))
        self.record(len(counted), reverse_kl=reverse.mean())
        return divergence.sum() * batch["n_micro"] / total

    def inputs_of(self, tokens: Tensor, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the inputs of the models for demonstrations, packed or padded."""
        if "position_ids" in batch:
            return packed_inputs(self.model, tokens, batch["position_ids"], batch.get("boundaries"))
        return {"input_ids": tokens}

    # ---------------------------------------------------------------- evaluation, diagnostics

    def log_held_out(self, batch: dict[str, Any]) -> None:
        """Logs the divergence on held-out demonstrations."""
        divergence, reverse = self.divergence(batch["counted"] - 1, self.beta, **self.inputs_of(batch["tokens"], batch))
        self.log_evaluation({"eval/loss": divergence.mean(), "eval/reverse_kl": reverse.mean()}, len(divergence))

    def log_completions(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs evaluation metrics, with the reverse KL to the teacher on held-out completions per token."""
        super().log_completions(batch, batch_idx)
        _, reverse = self.divergence_of_completions(batch, completion_mask(batch["length"]), 1.0)
        self.log_evaluation({"eval/reverse_kl": reverse.mean()}, len(reverse))

    def record_generation(self, rollout: Rollout) -> None:
        """Records rewards and lengths of a generation, over all ranks."""
        reward, length, finished = record_completions(self, rollout, rollout["reward"])
        self.record(**length_metrics(length, finished))
        if rollout["reward_names"]:
            n, mean, std = moments(reward)
            self.record((n > 0).float(), reward=mean, reward_std=std)
        if table_is_due(self):
            self.write_completions(rollout)
