"""The interface of samplers: from settings and prompts to completions with their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_modules.language.sampling.stop_strings import StopStrings

#: Called with each row that ends, while others are still written: its number, its token ids, and whether it finished.
RowListener = Callable[[int, list[int], bool], None]


@dataclass(frozen=True)
class Completions:
    """Sampled completions; row ``p * num_generations + g`` is prompt p's completion g, L the longest one's length."""

    #: (B, L) int64, padded on the right; the EOS token is part of a completion.
    tokens: Tensor
    #: (B, L) float32, in nats: of each token under the distribution it was drawn from, filters included; 0 in padding.
    log_prob: Tensor
    #: (B,) int64: tokens of each row, EOS included.
    length: Tensor
    #: (B,) bool: whether the row ended by an EOS token or a stop string, not by the limit on its length.
    finished: Tensor
    #: (B,) int64: the optimizer step of the weights that wrote each row; None: the current weights did.
    version: Tensor | None = None
    #: (B, L) bool: of completions in turns, whether the model wrote a token; None: it wrote all.
    written: Tensor | None = None
    #: (B, L) int64: of those, the turn that a token belongs to, from 0; what is read before a turn is part of it.
    turn: Tensor | None = None
    #: (B, L) float32: of those, the reward of each turn on its last written token; 0 elsewhere.
    turn_reward: Tensor | None = None
    #: Of those, per row: ``prompt_ids`` and ``messages``, and what ended it.
    dialogues: list[dict[str, Any]] | None = None
    #: The tokens that filters kept where each token was drawn, (B, N) int32, and their number, (B, L) int32, see
    #: :func:`rl_modules.language.sampling.support.packed`; None: not asked for, or not known.
    kept: Tensor | None = None
    kept_count: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """True where a token counts, (B, L) bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length.unsqueeze(-1)

    @property
    def finish_reason(self) -> list[str]:
        """``"stop"`` for an EOS token or a stop string, ``"length"`` for a row that was cut off, per row."""
        return ["stop" if finished else "length" for finished in self.finished.tolist()]


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn; ranges and meanings are those of :func:`rl_modules.language.sampling.sample`."""

    max_completion_length: int
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    return_sampling_mask: bool = False
    #: Texts that end a completion, too.
    stop: StopStrings | None = None


class Sampler(Protocol):
    """A way of writing completions with a policy's weights. What a subclass leaves out does nothing."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        seeds: Sequence[int],
        settings: SamplingSettings,
        on_ended: RowListener | None = None,
    ) -> Completions:
        """Writes ``num_generations`` completions of each prompt.

        Args:
            prompts: P lists of token ids.
            num_generations: G, completions per prompt.
            seeds: P · G integers, one per completion.
            settings: how tokens are drawn.
            on_ended: called with each row as it ends; a sampler that learns of rows only when all have ended calls it
                then.
        """
        ...

    def update_weights(self, model: Any, version: int = 0) -> None:
        """Loads a model's current weights; later completions are written with them.

        Args:
            model: causal language model.
            version: of these weights: the optimizer steps so far.
        """
        ...

    def forget_weights(self) -> None:
        """Makes the next :meth:`update_weights` load the weights in any case: they may have changed undetected."""
        return

    def sleep(self) -> None:
        """Releases device memory until :meth:`wake`; the next :meth:`update_weights` brings the weights again."""
        return

    def wake(self) -> None:
        """Takes the memory back; does nothing if the sampler is awake."""
        return

    def close(self) -> None:
        """Releases everything; the sampler is not used again."""
        return
