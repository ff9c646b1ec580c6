"""Layers on request: compiled ones, Liger's (Hsu et al. 2024, arXiv:2410.10989), and such as are recomputed.

One compilation serves all layers of a model, and texts of every length. Liger has norms, rotary embeddings and
feed-forward layers for GPUs.
"""

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import body_of, is_sharded, transformers_model
from rl_modules.language.fast.self_check import blocks_of

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


#: Operations whose results selective checkpointing keeps.
_PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]


def compile_layers(module: "LanguageModule") -> None:
    """Compiles the layers of the models that a module trains, in place; names of weights stay.

    The last layer of each is left out: fast paths choose tokens in it by hooks that differ from batch to batch.

    Raises:
        UsageError: torch can't compile here, or not these models.
    """
    _require_compilable(module)
    for model in module.trained_models:
        network = transformers_model(model)
        found = blocks_of(body_of(network))
        if found is None:
            raise UsageError(
                f"torch_compile=True compiles a model's layers, and {type(network).__name__} has none "
                "that were found; leave it out"
            )
        for block in found[1][:-1]:
            if block._compiled_call_impl is None:
                block.compile(dynamic=True)


def _require_compilable(module: "LanguageModule") -> None:
    if any(is_sharded(model) for model in module.trained_models):
        raise UsageError(
            "torch_compile=True: layers whose weights are sharded over ranks are gathered by hooks, which "
            "stay outside of compiled code; leave one of them out"
        )
    if module.gradient_checkpointing == "selective":
        raise UsageError(
            "torch_compile=True hides from gradient_checkpointing=selective which operations a layer has; "
            "set that to true or false"
        )
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, dtype=torch.float32, device=module.device))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"torch_compile=True: torch can't compile on {module.device.type} here ({reason}); it needs a "
            "C++ compiler on a CPU and Triton on CUDA, or leave it out"
        ) from error


def use_liger_kernel(model: Any, device: torch.device) -> None:
    """Replaces a model's layers by the package's, through transformers; losses and logits stay this project's.

    Raises:
        UsageError: the device is no GPU, the package is not installed, or it has no kernels for the architecture.
    """
    if device.type not in ("cuda", "xpu"):
        raise UsageError(f"use_liger_kernel=true needs a GPU, and this run computes on {device.type}; leave it out")
    if find_spec("liger_kernel") is None:
        raise UsageError("use_liger_kernel=true needs a package that is not installed: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    kind = transformers_model(model).config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(f"use_liger_kernel=true: liger-kernel has no kernels for {kind}; leave it out")
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def checkpoint_activations(model: PreTrainedModel, how: bool | str) -> None:
    """Makes the backward pass recompute a layer's activations instead of keeping them."""
    if how not in (True, False, "selective"):
        raise UsageError(f"gradient_checkpointing={how!r} must be true, false or selective")
    if not how:
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    # Newer versions of transformers warn of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)
