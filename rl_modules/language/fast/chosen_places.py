"""Forward passes that compute logits at chosen places only; the plain twin computes all and selects.

With a vocabulary of 150,000 tokens the output layer is most of a small model, and its logits are by far the largest
tensor of a training step. If completions are short, the last block's feed-forward part takes a large share of the
remaining time, and its output at other places is not used. The states are chosen within the model's forward pass, so
that wrappers (adapters, sharded weights) work as usual. Where a third of the tokens count, the last feed-forward part
alone is 12 % of a step's operations with 4 layers, and 2 % with 24.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_modules.language.architecture import body_of, text_config, transformers_model
from rl_modules.language.fast.self_check import agrees, blocks_of, probe_texts

#: Names of a block's feed-forward part in transformers' models.
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


@contextmanager
def hooked(model: Any, place: Tensor, mlp: nn.Module | None) -> Iterator[None]:
    """Inside, a forward pass returns logits [1, m, V] of the places [m] of the batch; ``mlp`` reads these only."""
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


def last_mlp(model: Any) -> nn.Module | None:
    """Returns the last block's feed-forward part; None if it mixes tokens, or is recomputed."""
    network = transformers_model(model)
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
    network = transformers_model(model)
    part = _feed_forward(network)
    text = probe_texts(model, [9])[0]
    place = torch.tensor([1, 4, 5, 8], device=text.device)
    whole = model(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    with hooked(model, place, part):
        chosen = model(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    return chosen, whole[place], whole[place]
