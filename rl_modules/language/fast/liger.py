"""Liger's kernels (Hsu et al. 2024, arXiv:2410.10989) for norms, rotary embeddings and feed-forward layers on a GPU."""

from importlib.util import find_spec
from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import transformers_model


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
