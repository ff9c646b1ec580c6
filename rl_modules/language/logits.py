"""Log-probabilities of tokens from the logits of the places that predict them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from rl_modules import functional as F
from rl_modules.fast import is_fast
from rl_modules.language.architecture import text_config

if TYPE_CHECKING:
    from rl_modules.language.sampling.support import Process

#: Elements of all logits from which on they are tiled; on a CPU 128 MB of float32.
TILED_ABOVE = {"cpu": 2**25, "accelerator": 2**29}
#: Tokens of a batch so large that every model with a large vocabulary tiles it.
_LARGE_BATCH = 2**16


class TokenStatistics(NamedTuple):
    """Statistics of m tokens that are kept instead of their logits."""

    #: log π in nats, [1, m] float32.
    log_prob: Tensor
    #: H in nats, [1, m] float32; None where not requested. Without gradient under ``equal_weights``.
    entropy: Tensor | None
    #: Whether a token is the likeliest, [1, m] bool; None where not requested.
    is_likeliest: Tensor | None


def logits_at(model: Any, place: Tensor, **inputs: Any) -> Tensor:
    """Returns the logits of a forward pass at m places, ``row * width + column``, all different, [1, m, V]."""
    inputs = {"use_cache": False, **inputs}
    if not is_fast():
        return model(**inputs).logits.flatten(0, 1)[place].unsqueeze(0)
    from rl_modules.language.fast.chosen_places import hooked, last_mlp

    with hooked(model, place, last_mlp(model)):
        return model(**inputs).logits


def logits_by_tiles(model: Any, place: Tensor, **inputs: Any) -> tuple[Callable[[slice], Tensor], int]:
    """Returns a function from a slice of places to their logits, [1, n, V], and how many places to ask for."""
    if is_large(len(place), model):
        from rl_modules.language.fast.tiled_head import can_tile, tiles_at
        from rl_modules.language.models import is_sharded

        if not is_sharded(model) and can_tile(model):
            return tiles_at(model, place, **inputs)
    logits = logits_at(model, place, **inputs)
    return lambda part: logits[:, part], len(place)


def log_probs_at(
    model: Any, place: Tensor, target: Tensor, temperature: float = 1.0, entropy: bool = False, accuracy: bool = False,
    source: Tensor | None = None, equal_weights: bool = False, process: Process | None = None, **inputs: Any,
) -> TokenStatistics:  # fmt: skip
    """Computes log π of m tokens, ``target``, that are predicted at n places; by tiles if their logits would be large.

    ``source`` [m] is the place that predicts each token (None: its own), ``process`` changes logits as sampling did.
    ``equal_weights``: the loss is a multiple of the sum of log π, which saves a second pass over the tiles.
    """
    arguments = target.unsqueeze(0), temperature, entropy, accuracy
    if is_large(len(target), model):
        from rl_modules.language.fast.tiled_head import can_tile, tiled_at

        if can_tile(model):
            return tiled_at(model, place, source, *arguments, equal_weights, process=process, **inputs)
    logits = logits_at(model, place, **inputs)
    logits = logits if source is None else logits[:, source]
    return statistics(logits if process is None else process(logits, slice(0, len(target))), *arguments)


def statistics(
    logits: Tensor, target: Tensor, temperature: float = 1.0, entropy: bool = False, accuracy: bool = False
) -> TokenStatistics:
    """Computes statistics of the tokens ``target`` [1, m] from their logits [1, m, V]."""
    log_prob = F.token_log_probs(logits, target, temperature)
    spread = F.token_entropy(logits, temperature) if entropy else None
    return TokenStatistics(log_prob, spread, logits.detach().argmax(-1) == target if accuracy else None)


def is_large(tokens: int, model: Any) -> bool:
    """Returns whether the logits of so many tokens are worth tiling."""
    elements = tokens * text_config(model.config).vocab_size
    return is_fast() and elements > TILED_ABOVE["cpu" if next(model.parameters()).is_cpu else "accelerator"]


def prepare_head(model: Any) -> None:
    """Checks now, not with the first batch, which fast paths of the output layer are exact for a model."""
    if is_fast():
        from rl_modules.language.fast.chosen_places import last_mlp

        last_mlp(model)
    if is_large(_LARGE_BATCH, model):
        from rl_modules.language.fast.tiled_head import can_tile

        can_tile(model)
