"""``torch.compile`` layer by layer: one compilation serves all layers of a model, and texts of every length."""

from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import transformers_model
from rl_modules.language.fast.self_check import blocks_of, body_of
from rl_modules.language.models import is_sharded


def compile_layers(module: Any) -> None:
    """Compiles the layers of the models that a module trains, in place; names of weights stay.

    The last layer of each is left out: fast paths choose tokens in it by hooks that differ from batch to batch.

    Raises:
        UsageError: torch can't compile here, or not these models.
    """
    _check(module)
    for model in module.trained_models:
        network = transformers_model(model)
        found = blocks_of(body_of(network))
        if found is None:
            raise UsageError(f"torch_compile=True compiles a model's layers, and {type(network).__name__} has none "
                             "that were found; leave it out")  # fmt: skip
        for block in found[1][:-1]:
            if block._compiled_call_impl is None:
                block.compile(dynamic=True)


def _check(module: Any) -> None:
    if any(is_sharded(model) for model in module.trained_models):
        raise UsageError("torch_compile=True: layers whose weights are sharded over ranks are gathered by hooks, which "
                         "stay outside of compiled code; leave one of them out")  # fmt: skip
    if module.hparams["gradient_checkpointing"] == "selective":
        raise UsageError("torch_compile=True hides from gradient_checkpointing=selective which operations a layer has; "
                         "set that to true or false")  # fmt: skip
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, dtype=torch.float32, device=module.device))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"torch_compile=True: torch can't compile on {module.device.type} here ({reason}); it needs a "
                         "C++ compiler on a CPU and Triton on CUDA, or leave it out") from error  # fmt: skip
