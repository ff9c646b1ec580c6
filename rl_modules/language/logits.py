"""Logits where they are needed, and nowhere else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def logits_at(model: Any, place: Tensor, **inputs: Any) -> Tensor:
    """A forward pass whose last layer sees chosen places only.

    With a vocabulary of 150,000 words the last layer is most of a small model, and its output by far the largest tensor
    of a training step. The hidden states are chosen on their way into it, inside of the model's own forward pass, so
    that wrappers (adapters, sharded weights) take part.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: places in the flattened batch, ``row * width + column``, [m].
        inputs: of the model: ``input_ids`` [rows, width] …

    Returns:
        Logits, [1, m, V].
    """
    with chosen_places(model, place):
        return model(**inputs, use_cache=False).logits


@contextmanager
def chosen_places(model: Any, place: Tensor) -> Iterator[None]:
    """Inside, the model's forward pass returns logits [1, m, V] of chosen places of the flattened batch.

    Args:
        model: causal language model of transformers, adapters of ``peft`` included.
        place: ``row * width + column``, [m].
    """

    def choose(layer: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states = arguments[0]
        return (states.flatten(0, 1).index_select(0, place).unsqueeze(0), *arguments[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()
