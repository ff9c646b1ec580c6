"""Logits where they are needed, and nowhere else."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_modules.language.models import text_config
from rl_modules.language.self_check import agrees, probe_texts
from rl_modules.language.sharding import is_sharded
from rl_modules.language.tiled_head import TokenStatistics, find_tail, is_large, statistics, tiled_statistics

#: What the list of blocks is called in transformers' models, and a block's feed-forward part.
_BLOCKS = ("layers", "h", "blocks")
#: Tokens of a batch so large that every model with a large vocabulary tiles it.
_LARGE_BATCH = 2**16
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


def logits_at(model: Any, place: Tensor, **inputs: Any) -> Tensor:
    """A forward pass that computes at its end what chosen places need.

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
    """Log π of tokens that are predicted at chosen places; where their logits would be large, by tiles.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: ``row * width + column`` in the flattened batch, all different, [n].
        target: the tokens predicted there, [m].
        temperature: T, the one that the tokens were sampled with.
        entropy: also the entropies.
        accuracy: also whether each token is the likeliest.
        source: which of the places predicts each token, [m] in [0, n); None: each the one of its own number.
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
    states = _states_at(model, place, _last_mlp(model), **inputs)
    return tiled_statistics(model, states if source is None else states[:, source], *arguments, equal_weights)


@contextmanager
def chosen_places(model: Any, place: Tensor) -> Iterator[None]:
    """Inside, the model's forward pass returns logits [1, m, V] of chosen places of the flattened batch.

    With a vocabulary of 150,000 words the output layer is most of a small model, and its logits by far the largest
    tensor of a training step. Where completions are short, the last block's feed-forward part is a good share of the
    rest, and nothing looks at what it gives for other places. The states are chosen inside of the model's own forward
    pass, so that wrappers (adapters, sharded weights) take part.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: ``row * width + column``, all different, [m].
    """
    with _hooked(model, place, _last_mlp(model)):
        yield


def _states_at(model: Any, place: Tensor, mlp: nn.Module | None, **inputs: Any) -> Tensor:
    """What the output layer would read for chosen places, [1, m, D]."""
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
    """Run the self-checks of this module now, not with the first batch.

    Args:
        model: causal language model.
    """
    _last_mlp(model)
    if is_large(_LARGE_BATCH, model):
        _can_tile(model)


def _can_tile(model: Any) -> bool:
    """Whether the output layer can be run by itself, and what the model does to its numbers is known."""
    # Outside of a sharded model's own forward pass its output layer has no weights.
    return not is_sharded(model) and agrees(
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
    states = _states_at(model, place, None, input_ids=text[None], use_cache=False)
    whole = statistics(logits[:, :-1], target).log_prob
    return tiled_statistics(model, states, target).log_prob, whole, whole


def _last_mlp(model: Any) -> nn.Module | None:
    """The last block's feed-forward part, if it reads one token at a time; else, or where recomputed, None."""
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Newer versions of transformers warn of the old name.
    old, new = "is_gradient_checkpointing", "is_activation_checkpointing"
    part = _feed_forward(network)
    if (
        part is None
        or getattr(network, new if hasattr(network, new) else old)
        or getattr(text_config(network.config), "output_router_logits", False)  # of all tokens, for the balance
        or not agrees(model, "choosing tokens before the last feed-forward part", lambda: _compare(model, part), "")
    ):
        return None
    return part


def _feed_forward(network: Any) -> nn.Module | None:
    body = network.get_decoder() if hasattr(network, "get_decoder") else network.base_model
    blocks = next((found for name in _BLOCKS if (found := getattr(body, name, None))), None)
    if not isinstance(blocks, nn.ModuleList):
        return None
    return next((found for name in _FEED_FORWARD if (found := getattr(blocks[-1], name, None))), None)


def _compare(model: Any, part: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    text = probe_texts(model, [9])[0]
    place = torch.tensor([1, 4, 5, 8], device=text.device)
    whole = model(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    with _hooked(model, place, part):
        chosen = model(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    return chosen, whole[place], whole[place]
