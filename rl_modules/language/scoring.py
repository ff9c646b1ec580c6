"""Log-probabilities of given texts by a model: of completions, and of tokens from the logits of chosen places.

Tokens are [b, T], prompts with their completions; prompt_length and length are [b] and at least 1; masks and results
are [b, L] with L the longest completion.

Sequences are right-padded. With causal attention no token attends to tokens on its right, so padding needs no attention
mask, and positions count from 0 by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules import functional as F
from rl_modules.common.modules import on
from rl_modules.fast import is_fast
from rl_modules.language.architecture import is_sharded, text_config
from rl_modules.language.fast.chosen_places import hooked, last_mlp
from rl_modules.language.fast.tiled_head import can_tile, tiled_at, tiles_at
from rl_modules.language.token_statistics import TokenStatistics, statistics

if TYPE_CHECKING:
    from rl_modules.language.sampling.support import Filter, Process
    from rl_modules.language.vision import RowImages

#: Tokens of the shortest prompt, of the longest row, and of the longest completion. If they are known from the shapes
#: of a batch, no synchronisation with the device is needed.
Extent = tuple[int, int, int]


def extent_of(prompt_length: Tensor, length: Tensor) -> Extent:
    """Returns the extent of a batch, by one transfer from the device."""
    first, last, width = torch.stack([prompt_length.min(), (prompt_length + length).max(), length.max()]).tolist()
    return first, last, width


def extent_in(batch: dict[str, Any]) -> Extent | None:
    """Returns the extent of a training batch, read off its shapes; None for a batch without ``shortest_prompt``."""
    first = batch.get("shortest_prompt")
    return None if first is None else (first, batch["tokens"].shape[1], batch["mask"].shape[1])


def completion_positions(prompt_length: Tensor, length: Tensor, width: int | None = None) -> Tensor:
    """Positions of each completion's tokens in their sequences, [b, L]; after its end the last place is repeated."""
    columns = torch.arange(int(length.max()) if width is None else width, device=length.device)
    return prompt_length.unsqueeze(1) + torch.minimum(columns, length.unsqueeze(1) - 1)


def completion_log_probs(
    model: Any,
    tokens: Tensor,
    prompt_length: Tensor,
    length: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    extent: Extent | None = None,
    filtered: Filter | None = None,
    images: RowImages | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log π of every completion token in nats, and with ``entropy`` their entropies, [b, L] float32, 0 after each end.

    Tokens are [b, T]; ``temperature`` and ``filtered`` are those of sampling. ``extent`` None asks the device for it.
    ``images`` are those of the prompts.
    """
    first, last, width = extent_of(prompt_length, length) if extent is None else extent
    counts = completion_mask(length, width)
    if filtered is not None or is_large(len(tokens) * (last - first), model):
        return _counted_log_probs(
            model, tokens[:, :last], prompt_length, counts, temperature, entropy, filtered, images
        )
    place = completion_positions(prompt_length, length, width)
    # Logits at t - 1 predict the token at t, so the last token's logits are not needed.
    judging = torch.arange(first - 1, last - 1, device=tokens.device)
    inputs = _inputs(model, tokens[:, : last - 1], prompt_length, images)
    logits = model(**inputs, logits_to_keep=judging, use_cache=False).logits
    log_prob = F.token_log_probs(logits, tokens[:, first:last], temperature)
    aligned = torch.where(counts, log_prob.gather(1, place - first), 0.0)
    if not entropy:
        return aligned, None
    spread = F.token_entropy(logits, temperature)
    return aligned, torch.where(counts, spread.gather(1, place - first), 0.0)


def _counted_log_probs(
    model: Any,
    tokens: Tensor,
    prompt_length: Tensor,
    counts: Tensor,
    temperature: float,
    entropy: bool,
    filtered: Filter | None,
    images: RowImages | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the same from the counted tokens' places only, [b, L], to save work and memory in the output layer."""
    row, column = counts.nonzero(as_tuple=True)
    at = prompt_length[row] + column
    width = tokens.shape[1] - 1
    inputs = _inputs(model, tokens[:, :-1], prompt_length, images)
    process = None if filtered is None else filtered.at(tokens, prompt_length, row, column)
    found = log_probs_at(model, row * width + at - 1, tokens[row, at], temperature, entropy, process=process, **inputs)
    aligned = [None if x is None else placed(x[0], row * counts.shape[1] + column, counts.shape) for x in found[:2]]
    assert aligned[0] is not None
    return aligned[0], aligned[1]


def _inputs(model: Any, tokens: Tensor, prompt_length: Tensor, images: RowImages | None) -> dict[str, Any]:
    return {"input_ids": tokens} if images is None else images.inputs(model, tokens, prompt_length)


def placed(values: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    """Values at flat places of a tensor that holds 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_copy(0, where, values).view(shape)


def completion_mask(length: Tensor, width: int | None = None) -> Tensor:
    """True for the tokens of each completion, [b, L]."""
    columns = torch.arange(int(length.max()) if width is None else width, device=length.device)
    return columns < length.unsqueeze(1)


def written_mask(rollout: dict[str, Any]) -> Tensor:
    """True for the tokens that the model wrote: all of a completion, or its turns of a dialogue, [b, L]."""
    mask = completion_mask(rollout["length"], rollout["log_prob"].shape[1])
    return mask & rollout["written"] if "written" in rollout else mask


def tokens_written(rollout: dict[str, Any]) -> Tensor:
    """Tokens of each completion that the model wrote, [b]."""
    return rollout["written"].sum(1) if "written" in rollout else rollout["length"]


# ---------------------------------------------------------------- logits of chosen places

#: Elements of all logits from which on they are tiled; on a CPU 128 MB of float32.
TILED_ABOVE = {"cpu": 2**25, "accelerator": 2**29}
#: Tokens of a batch so large that every model with a large vocabulary tiles it.
_LARGE_BATCH = 2**16


def logits_at(model: Any, place: Tensor, **inputs: Any) -> Tensor:
    """Returns the logits of a forward pass at m places, ``row * width + column``, all different, [1, m, V]."""
    inputs = {"use_cache": False, **inputs}
    if not is_fast():
        return model(**inputs).logits.flatten(0, 1)[place].unsqueeze(0)

    with hooked(model, place, last_mlp(model)):
        return model(**inputs).logits


def logits_by_tiles(model: Any, place: Tensor, **inputs: Any) -> tuple[Callable[[slice], Tensor], int]:
    """Returns a function from a slice of places to their logits, [1, n, V], and how many places to ask for."""
    if is_large(len(place), model) and not is_sharded(model) and can_tile(model):
        return tiles_at(model, place, **inputs)
    logits = logits_at(model, place, **inputs)
    return lambda part: logits[:, part], len(place)


def log_probs_at(
    model: Any,
    place: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    accuracy: bool = False,
    source: Tensor | None = None,
    equal_weights: bool = False,
    process: Process | None = None,
    **inputs: Any,
) -> TokenStatistics:
    """Computes log π of m tokens, ``target``, that are predicted at n places; by tiles if their logits would be large.

    ``source`` [m] is the place that predicts each token (None: its own), ``process`` changes logits as sampling did.
    ``equal_weights``: the loss is a multiple of the sum of log π, which saves a second pass over the tiles.
    """
    arguments = target.unsqueeze(0), temperature, entropy, accuracy
    if is_large(len(target), model) and can_tile(model):
        return tiled_at(model, place, source, *arguments, equal_weights, process=process, **inputs)
    logits = logits_at(model, place, **inputs)
    logits = logits if source is None else logits[:, source]
    return statistics(logits if process is None else process(logits, slice(0, len(target))), *arguments)


def is_large(tokens: int, model: Any) -> bool:
    """Returns whether the logits of so many tokens are worth tiling."""
    elements = tokens * text_config(model.config).vocab_size
    return is_fast() and elements > TILED_ABOVE["cpu" if next(model.parameters()).is_cpu else "accelerator"]


def prepare_head(model: Any) -> None:
    """Checks now, not with the first batch, which fast paths of the output layer are exact for a model."""
    if is_fast():
        last_mlp(model)
    if is_large(_LARGE_BATCH, model):
        can_tile(model)


def in_parts(
    forward_rows: int,
    rollout: dict[str, Any],
    compute: Callable[..., dict[str, Tensor]],
    filtered: Filter | None = None,
) -> dict[str, Tensor]:
    """Runs ``compute`` over a generation, in parts of ``forward_rows`` rows of similar length; it makes tensors [b] or
    [b, L]. Of rows with images it gets these as ``images``.
    """
    lengths = torch.stack([rollout["prompt_length"] + rollout["length"], rollout["length"]])
    total, length = lengths.tolist()
    order = sorted(range(len(total)), key=total.__getitem__)
    results: dict[str, Tensor] = {}
    for rows in on(lengths.device, order).split(forward_rows):
        longest = total[order[len(rows) - 1]]
        order = order[len(rows) :]
        text = (rollout["tokens"][rows, :longest], rollout["prompt_length"][rows], rollout["length"][rows])
        shown = {}
        if (images := rollout.get("images")) is not None:
            first, *others = (images[row] for row in rows.tolist())
            shown = {"images": first.joined(others)}
        for name, value in compute(*text, *([] if filtered is None else [filtered[rows]]), **shown).items():
            if name not in results:
                width = (max(length),) * (value.ndim - 1)
                results[name] = value.new_zeros((len(total), *width))
            if value.ndim == 1:
                results[name][rows] = value
            else:
                results[name][rows, : value.shape[1]] = value
    return results
