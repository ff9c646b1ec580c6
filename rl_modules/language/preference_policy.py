"""Base class for policies that learn from preferences against a frozen reference policy."""

import zlib
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.core.settings import changed, fixed, setting
from rl_modules.core.state import persistent
from rl_modules.language.fast.packing import can_pack_pairs
from rl_modules.language.pairs import pair_log_probs
from rl_modules.language.policy_with_reference import PolicyWithReference


class PreferencePolicy(PolicyWithReference):
    """A policy and its reference, whose log-probabilities of the training data are computed once and kept.

    The first visit of a pair takes a forward pass of the reference. Its result is kept in a table, which checkpoints
    hold: later passes over the data, and resumed runs, read the table.
    """

    beta: float = setting(
        default=0.1, says="β, units of implicit reward per nat of log-ratio to the reference", above=0
    )
    reference_free: bool = setting(
        default=False, says="compare with a uniform reference, whose log-ratio is log π itself; no reference is kept"
    )
    learning_rate = 1e-6
    max_completion_length: int = changed(says="maximum number of tokens per completion of held-out prompts")
    temperature, top_k, top_p = fixed(1.0), fixed(None), fixed(None)
    min_p, repetition_penalty = fixed(None), fixed(1.0)
    reward_weights, reward_model_name_or_path = fixed(None), fixed(None)
    local_rollout_forward_batch_size, completions_steps = fixed(), fixed(0)

    learns_from = "preferences"
    takes_images = True
    #: Whether the module learns from single answers with a label; the datamodule reads it.
    unpaired = False
    #: Off, because implicit rewards are differences to the reference and need no zero from demonstrations.
    scores_demonstrations = False

    # Reference log-probabilities of each pair, by the data and a checksum of them, [n, 2]; NaN: not computed yet.
    _tables: dict[str, Tensor] = persistent(lambda module: {})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._table_keys: dict[str, str] = {}

    @property
    def wants_reference(self) -> bool:
        return not self.reference_free

    @property
    def can_pack(self) -> bool:
        """Whether batches may hold several texts to a row."""
        # A separate reference may have another architecture.
        return all(can_pack_pairs(model) for model in (self.model, self.reference) if model is not None)

    def _setup(self, stage: str) -> None:
        super()._setup(stage)
        for data in ("train", "eval"):
            pairs = getattr(getattr(self.trainer, "datamodule", None), f"{data}_pairs", None)
            if pairs is not None:
                self.check_pairs(pairs, f"{data}_pairs")
                checksum = zlib.crc32(pairs.tokens.numpy().tobytes(), zlib.crc32(pairs.lengths.numpy().tobytes()))
                alpha = getattr(self, "ld_alpha", None)
                self._table_keys[data] = f"{data} {checksum}" if alpha is None else f"{data} {checksum} {alpha}"

    def sync_reference(self) -> bool:
        """Updates the reference when it is due, and forgets what the old one computed."""
        if is_updated := super().sync_reference():
            self._tables.clear()
        return is_updated

    def check_pairs(self, pairs: Any, name: str) -> None:
        """Refuses pairs from which a policy can't learn.

        Args:
            pairs: :class:`~datamodules.language.sequences.Pairs`.
            name: of the data, for the message.

        Raises:
            UsageError: a prompt is empty.
        """
        if len(pairs) and not bool(pairs.lengths[:, 0].all()):
            raise UsageError(
                f"{name}: a prompt is empty; the first token of an answer needs something that predicts "
                "it, such as the tokenizer's BOS token"
            )

    # ---------------------------------------------------------------- log-probabilities

    def reference_log_probs(self, batch: dict[str, Any], data: str) -> tuple[Tensor, Tensor]:
        """Σ_t log π_ref(y_t) of both answers of each pair, [b] float32 each, without gradient.

        Args:
            batch: see :func:`~rl_modules.language.pairs.pair_log_probs`, and ``index`` [b], the pairs'
                numbers in their data; without it nothing is kept.
            data: ``train`` or ``eval``.
        """
        if self.reference_free:
            zero = torch.zeros(len(batch["lengths"]), dtype=torch.float32, device=batch["tokens"].device)
            return zero, zero
        if "index" not in batch:
            return self._compute_reference(batch)
        index = batch["index"].cpu()
        table = self._table(data, int(index.max()) + 1)
        # Under sharding all ranks or none must run the reference.
        if self.most_over_ranks(int(table[index].isnan().any())):
            # Known values stay, so that a pair is compared with the same value throughout a run.
            computed = torch.stack(self._compute_reference(batch), 1).to(table)
            table[index] = torch.where(table[index].isnan(), computed, table[index])
        chosen, rejected = table[index].to(batch["tokens"].device, non_blocking=True).unbind(1)
        return chosen, rejected

    def sums(self, log_prob: Tensor, batch: dict[str, Any]) -> Tensor:
        """Returns log π of answers, [2b], from that of their tokens, [2b, L]."""
        return log_prob.sum(-1)

    @torch.no_grad()
    def _compute_reference(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with self.reference_model() as reference:
            chosen, rejected = self.sums(pair_log_probs(reference, batch)[0], batch).chunk(2)
        return chosen, rejected

    def _table(self, data: str, at_least: int) -> Tensor:
        """The table of some data, on the CPU, grown to hold ``at_least`` pairs."""
        key = self._table_keys.get(data, data)
        table = self._tables.get(key)
        size = max(at_least, len(getattr(getattr(self._trainer, "datamodule", None), f"{data}_pairs", ())))
        if table is None or len(table) < size:
            grown = torch.full((size, 2), torch.nan, dtype=torch.float32, device="cpu")
            if table is not None:
                grown[: len(table)] = table
            self._tables[key] = table = grown
        return table

    # ---------------------------------------------------------------- evaluation

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Returns implicit rewards of the answers, [b] each, with their ``texts``; completions unchanged."""
        if "answers" in batch:
            return batch
        # Not stored, because these pairs are numbered in another order.
        unnumbered = {name: value for name, value in batch.items() if name != "index"}
        return {"texts": batch["texts"], **self.implicit_rewards(unnumbered)}

    def implicit_rewards(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns β (log π - log π_ref) of the answers by name, [b] each."""
        raise NotImplementedError
