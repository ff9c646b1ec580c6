"""Supervised fine-tuning."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rl_modules.core.settings import changed, fixed
from rl_modules.language.architecture import text_config, wants_router_loss
from rl_modules.language.experts import router_logits, router_loss
from rl_modules.language.fast.packing import can_pack_texts, packed_inputs
from rl_modules.language.policy import LanguagePolicy
from rl_modules.language.scoring import log_probs_at
from rl_modules.language.token_statistics import TokenStatistics


class SFT(LanguagePolicy):
    """Supervised fine-tuning: maximises the likelihood of demonstrations (behaviour cloning with tokens as actions).

    Ouyang et al. 2022, arXiv:2203.02155, section 3.5. Per optimizer step, over its N tokens that count,

        L = -1/N Σ log π(y_t | x, y_<t)

    N counts the whole step, so neither the number of micro-batches nor of ranks changes a token's weight. The
    names are TRL's. Departures from it: logits are computed for counted tokens only; a packed row is as
    wide as the longest sequence of its micro-batch, and packing does not change which sequences a step has; token
    accuracy and entropy are measured only in logged steps.
    """

    learns_from = "demonstrations"
    balances_experts = True
    takes_images = True
    #: A model's dropout stays on; the batch's seed determines which units are dropped.
    dropout = True
    max_completion_length: int = changed(says="maximum number of tokens per completion in evaluations")
    temperature, top_k, top_p = fixed(1.0), fixed(None), fixed(None)
    min_p, repetition_penalty = fixed(None), fixed(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._drops = False

    @property
    def best_metric(self) -> tuple[str, str]:  # type: ignore[override]
        """The accuracy on held-out prompts or, without a reward function, the loss on held-out demonstrations."""
        has_rewards = len(getattr(getattr(self._trainer, "datamodule", None), "rewards", ())) > 0
        return ("eval/pass@1", "max") if has_rewards else ("eval/loss", "min")

    def begin_fit(self) -> None:
        super().begin_fit()
        # Of a model that also takes images, the language model's rates are in a part of the config.
        fields = {**self.model.config.to_dict(), **text_config(self.model.config).to_dict()}
        rates = [value for key, value in fields.items() if "drop" in key or "jitter" in key]
        layers = [module.p for module in self.model.modules() if isinstance(module, torch.nn.Dropout)]
        self._drops = any(isinstance(rate, int | float) and rate > 0 for rate in [*rates, *layers])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        is_logged = (self.trainer.global_step + 1) % self.logging_steps == 0
        with router_logits(self.model) if wants_router_loss(self.model) else nullcontext() as routers:
            found = self.demonstrated(batch, entropy=is_logged, accuracy=is_logged)
        total = -found.log_prob.sum()
        counted = found.log_prob.numel()
        self.num_tokens += batch["num_tokens"]
        self.record(counted, loss=total / counted)
        if found.entropy is not None and found.is_likeliest is not None:
            accuracy = found.is_likeliest.float().mean()
            self.record(counted, mean_token_accuracy=accuracy, entropy=found.entropy.detach().mean())
        # Lightning divides by the number of micro-batches; the tokens of the whole step are divided by here.
        loss = total * batch["n_micro"] / batch["step_tokens"]
        if routers is None:
            return loss
        balance = router_loss(self.model, routers[-1], batch["filled"], batch["tokens"].shape[1])
        self.record(aux_loss=balance)
        return loss + balance

    def demonstrated(self, batch: dict[str, Any], entropy: bool = False, accuracy: bool = False) -> TokenStatistics:
        """Returns log π of the demonstrations' counted tokens, in nats, [1, m].

        Args:
            batch: ``tokens`` [rows, width]; ``counted`` [m], places in ``tokens.flatten()``; ``position_ids`` where
                rows are packed; ``images`` of rows with images; ``seed`` of the dropout, in training.
            entropy: return also the entropies.
            accuracy: return also whether each token is the likeliest.
        """
        tokens, counted = batch["tokens"], batch["counted"]
        inputs = {"input_ids": tokens}
        if "position_ids" in batch:
            inputs = packed_inputs(self.model, tokens, batch["position_ids"], batch.get("boundaries"))
        elif "images" in batch:
            inputs = batch["images"].inputs(self.model, tokens)
        # A loss of a subclass may weight tokens, or have a gradient of the entropies.
        own = type(self).training_step is SFT.training_step and type(self).demonstrated is SFT.demonstrated
        # The state before a token is the one that predicts it.
        asked = self.model, counted - 1, tokens.flatten()[counted], 1.0, entropy, accuracy
        if not (self._drops and "seed" in batch):
            return log_probs_at(*asked, equal_weights=own, **inputs)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(batch["seed"])
            return log_probs_at(*asked, equal_weights=own, **inputs)

    @property
    def can_pack(self) -> bool:
        """Whether batches may hold several texts to a row."""
        return can_pack_texts(self.model)

    def log_held_out(self, batch: dict[str, Any]) -> None:
        """Logs the likelihood of held-out demonstrations."""
        found = self.demonstrated(batch, accuracy=True)
        assert found.is_likeliest is not None
        metrics = {
            "eval/loss": -found.log_prob.mean(),
            "eval/mean_token_accuracy": found.is_likeliest.float().mean(),
        }
        self.log_evaluation(metrics, found.log_prob.numel())

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity, exp of the mean loss per token."""
        for prefix in ("train/", "eval/"):
            if f"{prefix}loss" in metrics:
                metrics = {**metrics, f"{prefix}perplexity": math.exp(min(metrics[f"{prefix}loss"], 700.0))}
        return metrics
