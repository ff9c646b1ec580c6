"""Checks whether a fast path is exact on a loaded model: runs it and the plain path on a few tokens, once per model.

Transformers adds architectures faster than a list of them could be maintained. If a model's fast path gives other
numbers than one plain forward pass per text, the model takes the plain path, and a message says so. The comparison runs
on the model's first layers, which include every kind of its layers; only a disagreement is checked again on all layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode, uncompiled
from rl_modules.language.architecture import text_config, transformers_model
from rl_modules.language.models import is_sharded

log = logging.getLogger(__name__)

#: Relative error of log-probabilities that rounding may make: 24 layers of 896 units made 8e-3 in bfloat16, and 1e-6 in
#: float32, where 4e-6 may be.
_ROUNDING = {torch.bfloat16: 3e-2, torch.float16: 8e-3}
#: Results of checks, by model and by (check, attention implementation).
_known: WeakKeyDictionary[nn.Module, dict[tuple[str, str], bool]] = WeakKeyDictionary()


def agrees(
    model: Any,
    what: str,
    compare: Callable[[], tuple[Tensor, Tensor, Tensor]],
    instead: str,
    exact: bool = False,
    must_run: bool = False,
) -> bool:
    """Whether a fast path gives this model's own numbers in evaluation mode; cached per model and attention."""
    found = _known.setdefault(model, {})
    key = (what, str(model.config._attn_implementation))
    if key not in found:
        found[key] = False  # while the comparison runs, nothing else takes the fast path
        relative = 1e-6 if exact else _rounding(model)
        with _plainly(model):
            with first_layers(model) as is_part:
                verdict = _verdict(model, compare, relative, must_run=False) if is_part else None
            if verdict is None or not verdict.is_right:
                # A fast path is rejected only after a comparison on all layers.
                try:
                    verdict = _verdict(model, compare, relative, must_run)
                except BaseException:
                    del found[key]
                    raise
        if verdict.is_right is None:
            del found[key]
            return True
        found[key], reason = verdict.is_right, verdict.reason
        if not found[key] and instead:
            log.warning("%s: %s %s on this model, so that %s", type(model).__name__, what, reason, instead)
    return found[key]


class _Verdict(NamedTuple):
    #: None: the model's own numbers are not finite, since training has diverged or the weights are broken.
    is_right: bool | None
    reason: str


def _verdict(
    model: Any, compare: Callable[[], tuple[Tensor, Tensor, Tensor]], relative: float, must_run: bool
) -> _Verdict:
    try:
        fast, alone, batched = compare()
        if fast.shape != alone.shape:  # a compiled model does not call hooks that came later
            raise ValueError(f"gives numbers of shape {tuple(fast.shape)} in place of {tuple(alone.shape)}")
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        if must_run:
            raise
        return _Verdict(False, f"fails: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    if not bool(alone.isfinite().all()):
        return _Verdict(None, "")
    size, bound = _difference(fast, alone, batched, relative)
    if size > bound:  # a small log-probability may be the difference of two large logits, which are rounded
        bound += relative * max(_largest_logit(model) - float(alone.abs().max()), 0.0)
    return _Verdict(size <= bound, f"differs by {size:.2g} nats")


def require_left_to_right(model: Any) -> None:
    """Refuses a model in which a token attends to tokens on its right."""
    if not agrees(model, "reading from left to right", lambda: _with_other_ending(model), "", must_run=True):
        raise UsageError(f"{type(model).__name__} lets a token see what stands to its right, so that it can't write or "
                         "judge a text token by token; take a decoder-only architecture such as Qwen3, Llama or "
                         "Gemma")  # fmt: skip


def warn_of_noise(model: Any) -> None:
    """Warns if a model in training mode is random although ``remove_dropout`` has set its rates to 0."""
    tokens = probe_texts(model, [8])[0][None]
    found: list[Tensor] = []
    with _plainly(model, training=True), first_layers(model):
        for seed in (0, 1):
            torch.manual_seed(seed)
            found.append(_outputs(model, tokens).double())
    size, bound = _difference(found[1], found[0], found[0], _rounding(model))
    if size > bound:
        log.warning("%s draws random numbers in training mode, though its rates of dropout are 0 here: "
                    "log-probabilities of training are not those of the policy that acts",
                    type(model).__name__)  # fmt: skip


def _with_other_ending(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers after all tokens but the last, whose last token differs."""
    text = probe_texts(model, [8])[0][None]
    other = torch.cat([text[:, :-1], text[:, :1]], 1)
    first, second = (_outputs(model, tokens)[:, :-1] for tokens in (text, other))
    return second, first, first


def _outputs(model: Any, tokens: Tensor) -> Tensor:
    """Logits, or of a model with a ``score`` head the last hidden states."""
    network = transformers_model(model)
    if isinstance(getattr(network, "score", None), nn.Module):
        return network.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return model(input_ids=tokens, use_cache=False).logits


def _largest_logit(model: Any) -> float:
    """The largest size of a logit of a short text; 0 for a model with a ``score`` head."""
    network = transformers_model(model)
    if isinstance(getattr(network, "score", None), nn.Module):
        return 0.0
    return float(_outputs(model, probe_texts(model, [8])[0][None]).abs().max())


def _rounding(model: Any) -> float:
    """Error of a model's log-probabilities, relative to their size, that differently shaped products may make."""
    return _ROUNDING.get(_autocast_dtype(model) or next(model.parameters()).dtype, 4e-6)


def _difference(fast: Tensor, alone: Tensor, batched: Tensor, relative: float) -> tuple[float, float]:
    """Returns the fast path's largest error, and the largest that may be rounding."""
    fast, alone, batched = (x.double() for x in (fast, alone, batched))
    rounding, size = (batched - alone).abs().max(), alone.abs().max()
    return float((fast - alone).abs().max().nan_to_num(nan=torch.inf)), float(10 * rounding + relative * (1 + size))


@contextmanager
def _plainly(model: Any, training: bool = False) -> Iterator[None]:
    """Evaluation mode, or with ``training`` the mode that the model is in; no gradient, no traces in the generators."""
    weight = next(model.parameters())
    devices = [weight.device] if weight.device.type == "cuda" else []
    dtype = _autocast_dtype(model)
    with (
        torch.no_grad(),
        uncompiled(model),
        nullcontext() if training else evaluation_mode(model.modules()),
        torch.random.fork_rng(devices=devices),
        torch.autocast(weight.device.type, dtype=dtype, enabled=dtype is not None),
    ):
        yield


def _autocast_dtype(model: Any) -> torch.dtype | None:
    """The dtype that a check is autocast to, where attention takes 16 bits only; None: that of the weights."""
    weight = next(model.parameters())
    is_float32, kind = weight.dtype in (torch.float32, torch.float64), weight.device.type
    if is_float32 and "flash" not in str(model.config._attn_implementation):
        return None
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.bfloat16 if is_float32 else None


def probe_texts(model: Any, lengths: Sequence[int]) -> list[Tensor]:
    """Texts of given lengths whose tokens are spread over the vocabulary, [n] each, on the model's device."""
    words = text_config(model.config).vocab_size
    device = next(model.parameters()).device
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        (torch.arange(start, start + n, dtype=torch.long, device=device) * 7919 + 13) % words
        for start, n in zip(starts, lengths, strict=True)
    ]


def side_by_side(texts: Sequence[Tensor]) -> Tensor:
    """Texts as rows, padded on the right with token 0, [b, T]."""
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True)


def shortest_window(config: Any) -> int | None:
    """Returns the smallest window of the model's layers, in tokens; None: every layer attends to the whole text."""
    text = text_config(config)
    named = {
        name: value for name, value in text.to_dict().items()
        if ("window" in name or "chunk" in name) and not name.endswith(("layers", "pattern"))
    }  # fmt: skip
    fields = {name: value for name, value in named.items() if type(value) is int and value > 0}
    if getattr(text, "use_sliding_window", True) is False:
        fields.pop("sliding_window", None)
    return min(fields.values(), default=None)


# ---------------------------------------------------------------- the first layers of a model

#: Names of the list of blocks in transformers' models.
_BLOCKS = ("layers", "h", "blocks")
#: Attributes that number layers.
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")


def body_of(network: Any) -> nn.Module:
    """Returns the part of a transformers model that holds its blocks."""
    body: nn.Module = network.get_decoder() if hasattr(network, "get_decoder") else network.base_model
    return body


def blocks_of(body: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Returns a model's blocks and the name of the attribute that holds them; None: they were not found."""
    for name in _BLOCKS:
        found = getattr(body, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return name, found
    return None


@contextmanager
def first_layers(model: Any) -> Iterator[bool]:
    """Inside, the model has only its first layers, one of every kind, so that a check takes a tenth of the time."""
    network = transformers_model(model)
    body, config = body_of(network), text_config(network.config)
    found = None if is_sharded(model) else blocks_of(body)
    kinds = None if found is None else getattr(config, "layer_types", None)
    depth = None if found is None else _depth(found[1])
    if found is None or depth is None or getattr(config, "num_hidden_layers", None) != len(found[1]):
        yield False
        return
    name, blocks = found
    setattr(body, name, nn.ModuleList(list(blocks[:depth])))
    config.num_hidden_layers = depth
    if kinds is not None:
        config.layer_types = list(kinds[:depth])
    try:
        yield True
    finally:
        setattr(body, name, blocks)
        config.num_hidden_layers = len(blocks)
        if kinds is not None:
            config.layer_types = kinds


def _depth(blocks: nn.ModuleList) -> int | None:
    """How many layers hold every kind and end with the last one's; None: nearly all."""
    kinds = [_kind(block) for block in blocks]
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    complete = max(max(first.values()), 1)
    depth = next(i for i in range(complete, len(kinds)) if kinds[i] == kinds[-1]) + 1 if len(kinds) > 1 else 1
    return depth if 2 * depth <= len(kinds) else None


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What tells layers of different kinds apart: modules, their settings, and the shapes of their weights."""
    settings = tuple(
        (name, type(module).__name__, tuple(sorted(
            (key, str(value)) for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | type(None)) and key not in _NUMBERS and key != "training"
        )))
        for name, module in block.named_modules()
    )  # fmt: skip
    return settings, tuple((name, weight.shape) for name, weight in block.named_parameters())
