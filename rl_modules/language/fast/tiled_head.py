"""The output layer and its softmax by tiles of tokens, recomputed in the backward pass.

With a vocabulary of 150,000 words the logits of a batch are its largest tensor, and their gradient is as large. By
tiles, no more than one tile of either exists at a time, whatever the size of the batch (Hsu et al. 2024,
arXiv:2410.10989, section 3.2; here with log-probabilities for an output, so that any loss may follow).
A step of SFT with 16 texts of 512 tokens takes 1,122 MiB in place of 10,357 (``benchmarks.memory sft``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from rl_modules import functional as F
from rl_modules.functional.tokens import log_probs_and_gradient, token_log_probs_gradient
from rl_modules.language.architecture import is_sharded, text_config, transformers_model
from rl_modules.language.fast.chosen_places import hooked, last_mlp
from rl_modules.language.fast.self_check import agrees, probe_texts
from rl_modules.language.sampling.support import Process
from rl_modules.language.token_statistics import TokenStatistics, statistics

#: Elements of a tile's logits; on a CPU 64 MB of float32.
TILE = {"cpu": 2**24, "accelerator": 2**27}
#: A model's processing of the output layer's result.
Tail = Callable[[Tensor], Tensor]
_tails: WeakKeyDictionary[nn.Module, Tail] = WeakKeyDictionary()


def tiled_statistics(
    model: Any,
    states: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    accuracy: bool = False,
    equal_weights: bool = False,
    process: Process | None = None,
) -> TokenStatistics:
    """:func:`statistics` from what the output layer reads, with one tile of logits at a time."""
    head, tail = model.get_output_embeddings(), _tails[model]
    rows = max(1, TILE["cpu" if states.is_cpu else "accelerator"] // text_config(model.config).vocab_size)
    at_once = equal_weights and torch.is_grad_enabled()
    # Hooks on the output layer have chosen the states; a sharded model's are still there while tiles are computed.
    run = head.forward if is_sharded(model) else head
    asked = _Asked(head, run, tail, rows, temperature, entropy, accuracy, at_once, process)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    found = _Tiles.apply(states, target, asked, *weights)
    return TokenStatistics(found[0], found[1] if entropy else None, found[2] if accuracy else None)


class _Asked(NamedTuple):
    head: nn.Module
    run: Tail
    tail: Tail
    #: Tokens of a tile.
    rows: int
    temperature: float
    entropy: bool
    accuracy: bool
    #: Whether gradients are taken with the forward pass.
    at_once: bool
    #: Changes the logits of each token.
    process: Process | None = None

    def cast(self, kind: str) -> dict[str, Tensor]:
        """The output layer's weights as autocast would have them for each tile; none where it leaves them."""
        if type(self.head) is not nn.Linear or not torch.is_autocast_enabled(kind):
            return {}
        dtype = torch.get_autocast_dtype(kind)
        named = self.head.named_parameters()
        return {name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in named}

    def logits_of(self, x: Tensor, begin: int, cast: dict[str, Tensor]) -> Tensor:
        """Logits of a tile, whose first token has this number, by weights that :meth:`cast` returned."""
        logits = self.tail(functional_call(self.head, cast, (x,)) if cast else self.run(x))
        return logits if self.process is None else self.process(logits, slice(begin, begin + x.shape[1]))


class _Gradients:
    """Gradients of states and weights, summed up over tiles."""

    def __init__(self, weights: Sequence[Tensor], cast: dict[str, Tensor]) -> None:
        self.states: list[Tensor] = []
        self.weights: list[Tensor] | None = None
        self._dtypes = [weight.dtype for weight in weights]
        self._leaves = [x for x in cast.values() if x.requires_grad] if cast else list(weights)

    def add(
        self, asked: _Asked, x: Tensor, logits: Tensor, tile: tuple[Tensor, ...], entropy_slope: Tensor | None = None
    ) -> None:
        """Those of one tile."""
        target, log_prob, slope = tile
        z = logits.detach()
        chosen = z.gather(-1, target.unsqueeze(-1)).to(log_prob.dtype) / asked.temperature
        more = None
        if entropy_slope is not None:
            with torch.enable_grad():
                leaf = z.clone().requires_grad_()
                (more,) = torch.autograd.grad(F.token_entropy(leaf, asked.temperature), leaf, entropy_slope)
        # No operation of a known tail needs its result in the backward pass.
        token_log_probs_gradient(z, target, chosen - log_prob.unsqueeze(-1), slope, asked.temperature, out=z)
        if more is not None:
            z.add_(more)
        self.add_from(x, logits, z)

    def add_from(self, x: Tensor, logits: Tensor, slope: Tensor) -> None:
        """Those of one tile, from the gradient with respect to its logits."""
        part, *found = torch.autograd.grad(logits, [x, *self._leaves], slope)
        self.states.append(part)
        if self.weights is None:
            self.weights = [x.to(dtype) for x, dtype in zip(found, self._dtypes, strict=True)]
        else:
            for total, more in zip(self.weights, found, strict=True):
                total.add_(more)


class _Tiles(torch.autograd.Function):
    """Log-probabilities, entropies and whether each token is the likeliest (or empty tensors), tile by tile."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, target: Tensor, asked: _Asked, *weights: Tensor) -> tuple[Tensor, ...]:
        cast = asked.cast(states.device.type)
        parts, gradients = [], _Gradients(weights, cast)
        for i, (x, y) in enumerate(zip(states.split(asked.rows, 1), target.split(asked.rows, 1), strict=True)):
            with torch.set_grad_enabled(asked.at_once):
                x = x.detach().requires_grad_(asked.at_once)
                logits = asked.logits_of(x, i * asked.rows, cast)
            z = logits.detach()
            # No operation of a known tail needs its result in the backward pass.
            log_probs = log_probs_and_gradient if asked.at_once else F.token_log_probs
            parts.append(statistics(z, y, asked.temperature, asked.entropy, asked.accuracy, log_probs))
            if asked.at_once:
                gradients.add_from(x, logits, z)
            del logits, z
        log_prob, *others = (
            states.new_empty(0) if column[0] is None else torch.cat(column, 1) for column in zip(*parts, strict=True)
        )
        if asked.at_once:
            ctx.save_for_backward(torch.cat(gradients.states, 1), *(gradients.weights or []))
        else:
            ctx.save_for_backward(states, target, log_prob, *weights)
        ctx.asked, device = asked, states.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # The entropies' gradient is computed where a loss needs it, which `equal_weights` rules out.
        ctx.mark_non_differentiable(*(others if asked.at_once or not asked.entropy else others[1:]))
        ctx.set_materialize_grads(False)
        return log_prob, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, spread: Tensor | None, *others: Any) -> tuple[Any, ...]:
        asked: _Asked = ctx.asked
        if grad is None:
            assert spread is not None, "autograd runs this for a loss of either output"
            grad = torch.zeros_like(spread)
        if asked.at_once:
            torch._assert_async(
                (grad == grad[:, :1]).all(), "equal_weights=True, but the loss weights tokens unequally"
            )
            factor = grad[0, 0]
            states, *weights = (tensor * factor.to(tensor.dtype) for tensor in ctx.saved_tensors)
            return states, None, None, *weights
        states, target, log_prob, *weights = ctx.saved_tensors
        columns = [states, target, log_prob, grad, *([] if spread is None else [spread])]
        with torch.autocast(*ctx.autocast):
            cast = asked.cast(states.device.type)
            gradients = _Gradients(weights, cast)
            for i, (x, *tile) in enumerate(zip(*(tensor.split(asked.rows, 1) for tensor in columns), strict=True)):
                x = x.detach().requires_grad_()
                with torch.enable_grad():
                    logits = asked.logits_of(x, i * asked.rows, cast)
                gradients.add(asked, x, logits, tuple(tile[:3]), *tile[3:])
        return torch.cat(gradients.states, 1), None, None, *(gradients.weights or [])


def find_tail(model: Any, output: Tensor, logits: Tensor) -> bool:
    """Infers from an example how a model scales (Granite, Cohere) or caps (Gemma-2) its logits; False if it can't."""
    network = transformers_model(model)
    if any(True for _ in network.parameters(recurse=False)):
        return False  # a weight of the model's own may follow the output layer
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.get_output_embeddings().modules()):
        return False  # the second pass would drop other numbers
    for tail in _tails_of(text_config(model.config)):
        found = tail(output)
        error = (found.float() - logits.float()).abs().max()
        if found.shape == logits.shape and bool(error <= 1e-6 * logits.float().abs().max()):
            _tails[model] = tail
            return True
    return False


def _tails_of(config: Any) -> list[Tail]:
    """Returns all operations on logits that a number of a config could stand for."""
    numbers = {float(value) for value in config.to_dict().values() if isinstance(value, float | int) and value}
    scaled: list[Tail] = [lambda z: z]
    for c in sorted(numbers):
        scaled += [lambda z, c=c: z * c, lambda z, c=c: z / c, lambda z, c=c: torch.tanh(z / c) * c]  # type: ignore[misc]
    return scaled


# ---------------------------------------------------------------- the forward pass


@contextmanager
def _kept_states(model: Any, place: Tensor, mlp: nn.Module | None) -> Iterator[list[Tensor]]:
    """Yields a list for what the output layer would read of the places, of which it reads the first alone."""
    states: list[Tensor] = []

    def keep(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states.append(arguments[0])
        return (arguments[0][:, :1], *arguments[1:])

    with hooked(model, place, mlp), ExitStack() as hooks:  # whose own hook is first
        hooks.callback(model.get_output_embeddings().register_forward_pre_hook(keep).remove)
        yield states


def tiled_at(
    model: Any,
    place: Tensor,
    source: Tensor | None,
    target: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    accuracy: bool = False,
    equal_weights: bool = False,
    chooses_mlp: bool = True,
    process: Process | None = None,
    **inputs: Any,
) -> TokenStatistics:
    """:func:`~rl_modules.language.scoring.log_probs_at` by tiles; ``target`` is [1, m].

    A sharded model's output and the result depend on each other by a product with 0, so that its weights are gathered
    in the backward pass before the tiles need them.
    """
    within = is_sharded(model)
    found: list[TokenStatistics] = []

    def compute() -> TokenStatistics:
        chosen = states[0] if source is None else states[0][:, source]
        return tiled_statistics(model, chosen, target, temperature, entropy, accuracy, equal_weights, process)

    def replace(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        found.append(compute())
        return torch.zeros_like(output) + (0 * found[0].log_prob.sum()).to(output.dtype)

    with _kept_states(model, place, last_mlp(model) if chooses_mlp else None) as states, ExitStack() as hooks:
        if within:
            hooks.callback(model.get_output_embeddings().register_forward_hook(replace).remove)
        output = model(**{"use_cache": False, **inputs}).logits
    if not within:
        return compute()
    log_prob, spread, likeliest = found[0]
    nothing = 0 * output[..., 0].float().sum()
    return TokenStatistics(log_prob + nothing, None if spread is None else spread + nothing, likeliest)


def tiles_at(model: Any, place: Tensor, **inputs: Any) -> tuple[Callable[[slice], Tensor], int]:
    """:func:`~rl_modules.language.scoring.logits_by_tiles` of a model that :func:`can_tile`."""
    head, tail = model.get_output_embeddings(), _tails[model]
    with _kept_states(model, place, last_mlp(model)) as states:
        model(**{"use_cache": False, **inputs})
    size = TILE["cpu" if states[0].is_cpu else "accelerator"] // text_config(model.config).vocab_size
    return lambda part: tail(head(states[0][:, part])), max(1, size)


def can_tile(model: Any) -> bool:
    """Returns whether the output layer can be run by itself and the model's processing of its output is known."""
    return agrees(
        model, "computing the output layer in tiles", lambda: _compare_tiles(model), "all logits are computed at once"
    )


def _compare_tiles(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    text, head = probe_texts(model, [6])[0], model.get_output_embeddings()
    if not is_sharded(model) and ("forward" in vars(head) or head._forward_hooks or hasattr(head, "parametrizations")):
        raise ValueError("the output layer has a hook, a parametrization or another forward, which may read weights")
    output: list[Tensor] = []

    def spread(layer: nn.Module, inputs: Any, z: Tensor) -> Tensor:
        """Logits small and large, because a cap shows on large ones alone."""
        output.append(torch.linspace(-60, 60, z.numel(), device=z.device).view_as(z).to(z.dtype))
        return output[0]

    handle = head.register_forward_hook(spread)
    try:
        changed = model(input_ids=text[None], use_cache=False).logits
    finally:
        handle.remove()
    if not find_tail(model, output[0], changed):
        raise ValueError("what follows the output layer is not in the config")
    logits = model(input_ids=text[None], use_cache=False).logits
    place, target = torch.arange(5, device=text.device), text[None, 1:]
    whole = statistics(logits[:, :-1], target).log_prob
    tiled = tiled_at(model, place, None, target, chooses_mlp=False, input_ids=text[None])
    return tiled.log_prob, whole, whole
