"""Precision of 16 bits: which weights of language models may have it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

from rl_modules.common.errors import UsageError


class FrozenHalfPrecision(HalfPrecision):
    """``bf16-true`` as language models use it: frozen weights in bfloat16, trained weights and data as they are.

    Lightning's own plugin would round token counts, rewards and log-probabilities of a batch to 8 bits.
    """

    #: Type of the device that the strategy computes on; autocast must name it.
    device_type = "cpu"
    #: Whether parameters that require a gradient are adapters, which stay in float32; else all weights are converted.
    trains_adapters = False

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        for parameter in module.parameters():
            if parameter.is_floating_point() and not (self.trains_adapters and parameter.requires_grad):
                parameter.data = parameter.data.to(self._desired_input_dtype)
        return module

    def tensor_init_context(self) -> AbstractContextManager:
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager:
        return nullcontext()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast(self.device_type, dtype=self._desired_input_dtype, cache_enabled=False):
            yield

    def convert_input(self, data: Any) -> Any:
        return data


def adopt_precision(trainer: L.Trainer, trains_adapters: bool) -> None:
    """Replaces Lightning's ``bf16-true`` or ``16-true`` plugin, before weights are converted."""
    plugin: Any = trainer.precision_plugin
    if plugin.precision == "16-true" and trainer.state.fn == "fit":
        raise UsageError(
            "trainer.precision=16-true trains without a scale of the loss, so that small gradients become "
            "0; take bf16-true with lora, bf16-mixed, or on a GPU 16-mixed"
        )
    ours = FrozenHalfPrecision(plugin.precision)
    ours.device_type, ours.trains_adapters = trainer.strategy.root_device.type, trains_adapters
    trainer.strategy.precision_plugin = ours


def require_float32_masters(module: L.LightningModule, lora: bool, torch_dtype: str, learning_rate: float) -> None:
    """Refuses to train weights of 16 bits, in which a step of less than 1/512 of the weight is lost."""
    precision = module.trainer.precision
    sixteen = [p.dtype for p in module.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not sixteen and (lora or precision != "bf16-true"):
        return
    set_by = f"trainer.precision={precision}" if precision == "bf16-true" else f"torch_dtype={torch_dtype}"
    name = str(sixteen[0]).removeprefix("torch.") if sixteen else "bfloat16"
    raise UsageError(
        f"{set_by} would keep the trained weights in {name}, which rounds off steps of learning_rate="
        f"{learning_rate:g}; train all weights with trainer.precision=bf16-mixed and torch_dtype=float32, or adapters "
        "with lora"
    )
