"""Forward passes that compute logits only at the places that need them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_modules.language.models import text_config
from rl_modules.language.self_check import agrees, probe_texts
from rl_modules.language.shallow import blocks_of, body_of
from rl_modules.language.sharding import is_sharded
from rl_modules.language.tiled_head import TokenStatistics, find_tail, is_large, statistics, tiled_statistics

#: Names of a block's feed-forward part in transformers' models.
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
#: Tokens of a batch so large that every model with a large vocabulary tiles it.
_LARGE_BATCH = 2**16


def logits_at(model: Any, place: Tensor, **inputs: Any) -> Tensor:
    """Runs a forward pass that computes logits at chosen places only.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: places in the flattened batch, ``row * width + column``, all different, [m].
        inputs: of the model: ``input_ids`` [rows, width] …; without ``use_cache`` none is kept.

    Returns:
        Logits, [1, m, V].
    """
    with chosen_places(model, place):
        return model(**{"use_cache": False, **inputs}).logits


def log_probs_at(
    model: Any,
    place: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    accuracy: bool = False,
    source: Tensor | None = None,
    equal_weights: bool = False,
    **inputs: Any,
) -> TokenStatistics:
    """Computes log π of tokens that are predicted at chosen places; by tiles if their logits would be large.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: ``row * width + column`` in the flattened batch, all different, [n].
        target: the tokens predicted there, [m].
        temperature: T, the one that the tokens were sampled with.
        entropy: also the entropies.
        accuracy: also whether each token is the likeliest.
        source: index of the place that predicts each token, [m] in [0, n); None: token i is predicted at place i.
        equal_weights: the loss will be a multiple of the sum of all log-probabilities, which saves a second pass
            over the tiles.
        inputs: of the model, see :func:`logits_at`.
    """
    arguments = target.unsqueeze(0), temperature, entropy, accuracy
    inputs = {"use_cache": False, **inputs}
    if not (is_large(len(target), model) and _can_tile(model)):
        with chosen_places(model, place):
            logits = model(**inputs).logits
        return statistics(logits if source is None else logits[:, source], *arguments)
    return _tiled_at(model, place, _last_mlp(model), source, *arguments, equal_weights, **inputs)


def _tiled_at(
    model: Any,
    place: Tensor,
    mlp: nn.Module | None,
    source: Tensor | None,
    target: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    accuracy: bool = False,
    equal_weights: bool = False,
    **inputs: Any,
) -> TokenStatistics:
    """:func:`log_probs_at` by tiles; ``target`` is [1, m]."""

    def compute(states: Tensor) -> TokenStatistics:
        states = states if source is None else states[:, source]
        return tiled_statistics(model, states, target, temperature, entropy, accuracy, equal_weights)

    if not is_sharded(model):
        return compute(_states_at(model, place, mlp, **inputs))
    return _within_forward(model, place, mlp, compute, **inputs)


def _within_forward(
    model: Any, place: Tensor, mlp: nn.Module | None, compute: Callable[[Tensor], TokenStatistics], **inputs: Any
) -> TokenStatistics:
    """Applies ``compute`` to the output layer's inputs while that layer's weights are gathered.

    A sharded model gathers the weights of its output layer for its own forward pass, and again for the backward pass
    once a gradient reaches its output. Therefore the output is made to depend on the result, and the result on the
    output, by a product with 0. The gradient then reaches the output, and the weights are gathered, before the tiles
    need them.

    Args:
        model: causal language model with sharded weights.
        place: see :func:`log_probs_at`.
        mlp: see :func:`_hooked`.
        compute: from the states [1, m, D].
        inputs: of the model.
    """
    states: list[Tensor] = []
    found: list[TokenStatistics] = []

    def keep(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states.append(arguments[0])
        return (arguments[0][:, :1], *arguments[1:])

    def replace(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        found.append(compute(states[0]))
        return torch.zeros_like(output) + (0 * found[0].log_prob.sum()).to(output.dtype)

    with ExitStack() as hooks:
        hooks.enter_context(_hooked(model, place, mlp))  # whose own hook comes first
        head = model.get_output_embeddings()
        hooks.callback(head.register_forward_pre_hook(keep).remove)
        hooks.callback(head.register_forward_hook(replace).remove)
        nothing = 0 * model(**inputs).logits[..., 0].float().sum()
    log_prob, spread, likeliest = found[0]
    return TokenStatistics(log_prob + nothing, None if spread is None else spread + nothing, likeliest)


@contextmanager
def chosen_places(model: Any, place: Tensor) -> Iterator[None]:
    """Inside, the model's forward pass returns logits [1, m, V] of chosen places of the flattened batch.

    With a vocabulary of 150,000 tokens the output layer is most of a small model, and its logits are by far the largest
    tensor of a training step. If completions are short, the last block's feed-forward part takes a large share of the
    remaining time, and its output at other places is not used. The states are chosen within the model's forward pass,
    so that wrappers (adapters, sharded weights) work as usual.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: ``row * width + column``, all different, [m].
    """
    with _hooked(model, place, _last_mlp(model)):
        yield


def _states_at(model: Any, place: Tensor, mlp: nn.Module | None, **inputs: Any) -> Tensor:
    """Returns the output layer's inputs at chosen places, [1, m, D]."""
    states: list[Tensor] = []

    def keep(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states.append(arguments[0])
        return (arguments[0][:, :1], *arguments[1:])

    with _hooked(model, place, mlp):  # whose own hook comes first
        handle = model.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            model(**inputs)
        finally:
            handle.remove()
    return states[0]


@contextmanager
def _hooked(model: Any, place: Tensor, mlp: nn.Module | None) -> Iterator[None]:
    shape: list[int] = []

    def choose(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        shape[:] = arguments[0].shape
        return (arguments[0].flatten(0, 1).index_select(0, place).unsqueeze(0), *arguments[1:])

    def put_back(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows, width, size = shape
        return output.new_zeros(rows * width, size).index_copy(0, place, output[0]).view(rows, width, size)

    with ExitStack() as hooks:
        hooks.callback(model.get_output_embeddings().register_forward_pre_hook(choose).remove)
        if mlp is not None:
            hooks.callback(mlp.register_forward_pre_hook(choose).remove)
            hooks.callback(mlp.register_forward_hook(put_back).remove)
        yield


def prepare_head(model: Any) -> None:
    """Runs the self-checks of this module now, not with the first batch.

    Args:
        model: causal language model.
    """
    _last_mlp(model)
    if is_large(_LARGE_BATCH, model):
        _can_tile(model)


def _can_tile(model: Any) -> bool:
    """Returns whether the output layer can be run by itself and the model's processing of its output is known."""
    return agrees(
        model, "computing the output layer in tiles", lambda: _compare_tiles(model), "all logits are computed at once"
    )


def _compare_tiles(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    text = probe_texts(model, [6])[0]
    output: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda layer, inputs, z: output.append(z))
    try:
        logits = model(input_ids=text[None], use_cache=False).logits
    finally:
        handle.remove()
    if not find_tail(model, output[0], logits):
        raise ValueError("what follows the output layer is not in the config")
    place, target = torch.arange(5, device=text.device), text[None, 1:]
    whole = statistics(logits[:, :-1], target).log_prob
    tiled = _tiled_at(model, place, None, None, target, input_ids=text[None], use_cache=False)
    return tiled.log_prob, whole, whole


def _last_mlp(model: Any) -> nn.Module | None:
    """Returns the last block's feed-forward part if it reads one token at a time; None if not, or if it is
    recomputed.
    """
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Newer versions of transformers warn of the old name.
    old, new = "is_gradient_checkpointing", "is_activation_checkpointing"
    part = _feed_forward(network)
    if (
        part is None
        or getattr(network, new if hasattr(network, new) else old)
        or getattr(text_config(network.config), "output_router_logits", False)  # of all tokens, for the balance
        or not agrees(model, "choosing tokens before the last feed-forward part", lambda: _compare(model), "")
    ):
        return None
    return part


def _feed_forward(network: Any) -> nn.Module | None:
    found = blocks_of(body_of(network))
    if found is None:
        return None
    return next((part for name in _FEED_FORWARD if (part := getattr(found[1][-1], name, None))), None)


def _compare(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    part = _feed_forward(network)  # of the last of the layers that the model has during the check
    text = probe_texts(model, [9])[0]
    place = torch.tensor([1, 4, 5, 8], device=text.device)
    whole = model(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    with _hooked(model, place, part):
        chosen = model(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    return chosen, whole[place], whole[place]
