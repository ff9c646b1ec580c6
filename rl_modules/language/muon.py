"""Muon (Jordan et al. 2024) for the hidden matrices, AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_modules.common.notices import notice

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW, which share this optimizer's groups and state: a schedule and a checkpoint see one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Gives the parts this optimizer's groups, in their order, and its state."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state, first = self.param_groups[first:last], self.state, last

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def muon_with_adamw(module: LanguageModule, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Muon for the matrices between embedding and output layer, AdamW for these two, for vectors and all else.

    Muon's step is scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that both take
    ``learning_rate``.
    """
    given = list(parameters)
    outer = {id(weight) for weight in _outer_weights(module)}
    hidden = [p for p in given if p.ndim == 2 and min(p.shape) > 1 and id(p) not in outer]
    inner = {id(weight) for weight in hidden}
    others = [p for p in given if id(p) not in inner]
    decay = module.weight_decay
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    sizes = [sum(p.numel() for p in some) for some in (hidden, others)]
    notice(
        f"optim=muon: Muon trains {len(hidden)} hidden matrices of {sizes[0]:,} weights, AdamW {len(others)} others of "
        f"{sizes[1]:,}: embeddings, the output layer, heads, norms, biases"
    )
    muon = torch.optim.Muon(hidden, lr=module.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    filled = [group for group in groups if group["params"]]  # none where all that is trained is adapters
    return MuonWithAdamW(
        muon, *([torch.optim.AdamW(filled, lr=module.learning_rate, eps=module.adam_eps)] if filled else [])
    )


def _outer_weights(module: nn.Module) -> Iterable[Tensor]:
    """The weights of embeddings and output layers."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield part.weight
        head = part.get_output_embeddings() if isinstance(part, PreTrainedModel) else None
        yield from () if head is None else head.parameters()
