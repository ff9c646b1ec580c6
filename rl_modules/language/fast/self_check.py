"""Checks whether a fast path is exact on a loaded model: runs it and the plain path on a few tokens, once per model.

Transformers adds architectures faster than a list of them could be maintained. If a model's fast path gives other
numbers than one plain forward pass per text, the model takes the plain path, and a message says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import evaluation_mode, uncompiled
from rl_modules.language.architecture import text_config, transformers_model

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
    must_run: bool = False,
) -> bool:
    """Whether a fast path gives this model's own numbers in evaluation mode; cached per model and attention."""
    found = _known.setdefault(model, {})
    key = (what, str(model.config._attn_implementation))
    if key not in found:
        found[key] = False  # while the comparison runs, nothing else takes the fast path
        try:
            with _plainly(model):
                reason = _disagreement(model, compare, _rounding(model), must_run)
        finally:
            del found[key]
        if reason is None:
            return True
        found[key] = not reason
        if reason and instead:
            log.warning("%s: %s %s on this model, so that %s", type(model).__name__, what, reason, instead)
    return found[key]


def _disagreement(
    model: Any, compare: Callable[[], tuple[Tensor, Tensor, Tensor]], relative: float, must_run: bool
) -> str | None:
    """What is wrong with a fast path, else nothing; None: the model's own numbers are not finite."""
    try:
        fast, alone, batched = compare()
        if fast.shape != alone.shape:  # a compiled model does not call hooks that came later
            raise ValueError(f"gives numbers of shape {tuple(fast.shape)} in place of {tuple(alone.shape)}")
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        if must_run:
            raise
        return f"fails: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    if not bool(alone.isfinite().all()):
        return None
    size, bound = _difference(fast, alone, batched, relative)
    if size > bound:  # a small log-probability may be the difference of two large logits, which are rounded
        bound += relative * max(_largest_logit(model) - float(alone.abs().max()), 0.0)
    return "" if size <= bound else f"differs by {size:.2g} nats"


@torch.enable_grad()
def alone_with(model: Any, judge: Callable[[], Tensor], others: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros, [1] each, for :func:`agrees`; they stand for a gradient, which shows a leak that small weights hide.

    Raises:
        ValueError: the numbers of ``judge`` depend on the tokens ``others`` of its rows.
    """
    embedded: list[Tensor] = []

    def keep(layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = transformers_model(model).get_input_embeddings().register_forward_hook(keep)
    try:
        numbers = judge().float()
    finally:
        handle.remove()
    weights = torch.arange(1.0, 1 + numbers.numel(), device=numbers.device).cos().view(numbers.shape)
    (slope,) = torch.autograd.grad((numbers * weights).sum(), embedded[:1])
    if bool((slope[:, others] != 0).any()):
        raise ValueError("a text depends on the tokens of another one")
    none = slope.new_zeros(1)
    return none, none, none


def require_left_to_right(model: Any) -> None:
    """Refuses a model in which a token attends to tokens on its right."""
    if not agrees(model, "reading from left to right", lambda: _with_other_ending(model), "", must_run=True):
        raise UsageError(
            f"{type(model).__name__} lets a token see what stands to its right, so that it can't write or "
            "judge a text token by token; take a decoder-only architecture such as Qwen3, Llama or "
            "Gemma"
        )


def warn_of_noise(model: Any) -> None:
    """Warns if a model in training mode is random although ``remove_dropout`` has set its rates to 0."""
    tokens = probe_texts(model, [8])[0][None]
    found: list[Tensor] = []
    with _plainly(model, training=True):
        for seed in (0, 1):
            torch.manual_seed(seed)
            found.append(_outputs(model, tokens).double())
    size, bound = _difference(found[1], found[0], found[0], _rounding(model))
    if size > bound:
        log.warning(
            "%s draws random numbers in training mode, though its rates of dropout are 0 here: "
            "log-probabilities of training are not those of the policy that acts",
            type(model).__name__,
        )


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
    dtype = _autocast_dtype(model) or next(model.parameters()).dtype
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = torch.float16  # products round single precision to as many bits
    return _ROUNDING.get(dtype, 4e-6)


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
        torch.inference_mode(False),  # a validation's
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
    name = str(model.config._attn_implementation)
    if is_float32 and "flash" not in name and (kind != "cuda" or "varlen" not in name):
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
        name: value
        for name, value in text.to_dict().items()
        if ("window" in name or "chunk" in name) and not name.endswith(("layers", "pattern"))
    }
    fields = {name: value for name, value in named.items() if type(value) is int and value > 0}
    if getattr(text, "use_sliding_window", True) is False:
        fields.pop("sliding_window", None)
    return min(fields.values(), default=None)


#: Names of the list of blocks in transformers' models.
_BLOCKS = ("layers", "h", "blocks")


def blocks_of(body: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Returns a model's blocks and the name of the attribute that holds them; None: they were not found."""
    for name in _BLOCKS:
        found = getattr(body, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return name, found
    return None
