"""Mixtures of experts: the loss that keeps their routers in balance."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import text_config, transformers_model, wants_router_loss

if TYPE_CHECKING:
    from rl_modules.language.grpo import GRPO


def check_router_loss(model: Any, given: dict[str, Any], algorithm: str, is_added: bool) -> None:
    """Refuses a config that asks in vain for the loss; warns of a mixture of experts that is trained without it."""
    coefficient = getattr(text_config(model.config), "router_aux_loss_coef", None)
    if wants_router_loss(model):
        if not is_added:
            raise UsageError(
                f"output_router_logits=true asks for a loss that keeps experts in balance, which SFT, "
                f"GRPO and RLOO add and {algorithm} does not; set it to false there"
            )
    elif "router_aux_loss_coef" in given and "output_router_logits" not in given:
        raise UsageError(
            f"model_config has router_aux_loss_coef={coefficient}, which does nothing without "
            "output_router_logits: set that to true for SFT, GRPO or RLOO, which have it"
        )
    elif coefficient and not is_added:
        rank_zero_warn(
            f"router_aux_loss_coef={coefficient} of the model's config has no effect: {algorithm} trains a "
            "mixture of experts without a loss of balance, which SFT, GRPO and RLOO have"
        )


@contextmanager
def router_logits(model: Any) -> Iterator[list[tuple[Tensor, ...]]]:
    """Collects the logits of every layer's router, [rows · width, experts] each, in the context's passes."""
    network = transformers_model(model)
    found: list[tuple[Tensor, ...]] = []
    hook = network.register_forward_hook(lambda module, inputs, output: found.append(output.router_logits))
    try:
        yield found
    finally:
        hook.remove()


def router_loss(model: Any, logits: tuple[Tensor, ...], filled: Tensor, width: int) -> Tensor:
    """Returns the model's own loss of its routers, times ``router_aux_loss_coef``; padding does not count."""
    network = transformers_model(model)
    function = getattr(sys.modules[type(network).__module__], "load_balancing_loss_func", None)
    if function is None:
        raise UsageError(
            f"output_router_logits=true: {type(network).__name__} has no load balancing loss in "
            "transformers; set model_config.output_router_logits=false"
        )
    mask = torch.arange(width, device=filled.device) < filled.unsqueeze(1)
    loss = function(logits, network.num_experts, network.num_experts_per_tok, mask)
    return text_config(model.config).router_aux_loss_coef * loss


def completions_router_loss(module: "GRPO", logits: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    """Returns and records the same over the tokens of prompts and completions of a minibatch."""
    filled = batch["prompt_length"] + batch["length"]
    # The forward pass does not read the last column, which predicts nothing.
    balance = router_loss(module.model, logits, filled, len(logits[0]) // len(filled))
    module.record(aux_loss=balance.detach())
    return balance
