"""Logits where they are needed, and nowhere else."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

#: Architectures whose last block ends with an ``mlp`` that sees one token at a time; each is in the tests.
PLAIN = frozenset({"gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})


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
    shape: list[int] = []

    def choose(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        shape[:] = arguments[0].shape
        return (arguments[0].flatten(0, 1).index_select(0, place).unsqueeze(0), *arguments[1:])

    def put_back(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows, width, size = shape
        return output.new_zeros(rows * width, size).index_copy(0, place, output[0]).view(rows, width, size)

    with ExitStack() as hooks:
        hooks.callback(model.get_output_embeddings().register_forward_pre_hook(choose).remove)
        mlp = _last_mlp(model)
        if mlp is not None:
            hooks.callback(mlp.register_forward_pre_hook(choose).remove)
            hooks.callback(mlp.register_forward_hook(put_back).remove)
        yield


def _last_mlp(model: Any) -> nn.Module | None:
    """The last block's feed-forward part; None where it can't be told, or would be run again without our hooks."""
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Newer versions of transformers warn of the old name.
    old, new = "is_gradient_checkpointing", "is_activation_checkpointing"
    if network.config.model_type not in PLAIN or getattr(network, new if hasattr(network, new) else old):
        return None
    body: Any = network.base_model
    return (body.h if hasattr(body, "h") else body.layers)[-1].mlp
