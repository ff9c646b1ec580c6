"""The balance loss of a mixture of experts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import text_config


@contextmanager
def router_logits(model: Any) -> Iterator[list[tuple[Tensor, ...]]]:
    """Collects the logits of every layer's router, [rows · width, experts] each, in each forward pass in the
    context.
    """
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    found: list[tuple[Tensor, ...]] = []
    hook = network.register_forward_hook(lambda module, inputs, output: found.append(output.router_logits))
    try:
        yield found
    finally:
        hook.remove()


def router_loss(model: Any, logits: tuple[Tensor, ...], filled: Tensor, width: int) -> Tensor:
    """Returns the model's own loss of its routers, times ``router_aux_loss_coef``; padding does not count."""
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    function = getattr(sys.modules[type(network).__module__], "load_balancing_loss_func", None)
    if function is None:
        raise UsageError(f"output_router_logits=true: {type(network).__name__} has no load balancing loss in "
                         "transformers; set model_config.output_router_logits=false")  # fmt: skip
    mask = torch.arange(width, device=filled.device) < filled.unsqueeze(1)
    loss = function(logits, network.num_experts, network.num_experts_per_tok, mask)
    return text_config(model.config).router_aux_loss_coef * loss


def completions_router_loss(module: Any, logits: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    """Returns and records the same over the tokens of prompts and completions of a minibatch."""
    filled = batch["prompt_length"] + batch["length"]
    # The forward pass does not read the last column, which predicts nothing.
    balance = router_loss(module.model, logits, filled, len(logits[0]) // len(filled))
    module.record(aux_loss=balance.detach())
    return balance
