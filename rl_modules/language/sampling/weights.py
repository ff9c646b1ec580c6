"""A policy's weights and config in the form in which another engine loads them: that of a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import is_sharded, transformers_model
from rl_modules.language.lora import adapts_tied_weight, merged

Weights = Iterator[tuple[str, Tensor]]
Fingerprint = tuple[nn.Module, int, int]
_LORA = "base_model.model."
#: What the names of a layer's weights begin with; empty for others.
_LAYER = re.compile(r"(?:.*?\.\d+\.)?")


@torch.no_grad()
def named_weights(model: Any) -> Weights:
    """Yields each weight under its checkpoint's name, adapters merged in, sharded ones gathered one at a time."""
    if getattr(model, "is_quantized", False):
        model = merged(model)
    network = transformers_model(model)
    yield from _renamed(network, itertools.chain(_merged(model, is_tied(network)), _buffers(model)))


def is_tied(network: Any) -> bool:
    """Returns whether the output layer computes with the embedding's weight, also after adapters are merged in."""
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    return head is not None and head.weight is embedding.weight and not adapts_tied_weight(network)


def engine_config(network: Any) -> dict[str, Any]:
    """Returns the config of a transformers model as its checkpoint has it, with ``architectures`` and ``dtype``."""
    config: dict[str, Any] = json.loads(network.config.to_json_string(use_diff=False))
    config.pop("quantization_config", None)  # its weights arrive as those that the quantized ones stand for
    tied = bool(network.config.tie_word_embeddings) and is_tied(network)
    dtype = str(computing_dtype(network)).removeprefix("torch.")
    kind, model_type = type(network).__name__, network.config.model_type
    return {**config, "architectures": [kind], "model_type": model_type, "tie_word_embeddings": tied, "dtype": dtype}


def computing_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype that a model's layers compute in here: autocast's under ``bf16-mixed``, or its weights'."""
    weight = next(model.parameters())
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def fingerprint(model: nn.Module, version: int) -> Fingerprint:
    """Returns a value that changes whenever weights change."""
    return model, version, sum(parameter._version for parameter in model.parameters())


def _merged(model: Any, tied: bool) -> Weights:
    """Parameters without LoRA: W + B A · scale where a layer has adapters; one that is shared once where ``tied``."""
    if not hasattr(model, "merge_and_unload"):
        for name, parameter in model.named_parameters():
            yield name, _whole(parameter)
        return
    if is_sharded(model):
        raise UsageError("lora on sharded weights can't be merged for another sampler; take sampler=native")
    layers = {
        name.removeprefix(_LORA): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, parameter in model.named_parameters(remove_duplicate=tied):
        name = name.removeprefix(_LORA)
        if "lora_" in name or ".original_module." in name:
            continue
        # Parameters of one module that are adapted by themselves have a wrapper each, one around the other.
        layer_name, _, kind = name.rpartition(".")
        weight = parameter.detach()
        while layer_name.endswith(".base_layer"):
            layer_name = layer_name.removesuffix(".base_layer")
            if layer_name in layers:
                weight = _with_adapters(layers[layer_name], kind, weight)
            elif kind == "weight":
                raise UsageError(
                    f"lora changes {layer_name} by trainable_token_indices or the like, which can't be "
                    "merged for another sampler; take sampler=native"
                )
        name = re.sub(r"(\.base_layer)+\.", ".", name)
        for adapter in model.active_adapters:
            name = name.replace(f".modules_to_save.{adapter}.", ".")
        yield name, weight


def _with_adapters(layer: Any, kind: str, weight: Tensor) -> Tensor:
    """Returns a parameter of the adapters' base layer, named ``kind``, with the adapters' change added."""
    adapters = [adapter for adapter in layer.active_adapters if adapter in layer.scaling]
    if kind == "bias":
        for adapter in adapters:
            if layer.lora_bias.get(adapter):
                weight = weight + (layer.lora_B[adapter].bias * layer.scaling[adapter]).to(weight.dtype)
        return weight
    if kind != getattr(layer, "parameter_name", "weight"):
        return weight
    if any(adapter in getattr(layer, "lora_magnitude_vector", ()) for adapter in adapters):
        # DoRA scales the sum of both.
        merged = copy.deepcopy(layer)
        merged.merge(adapter_names=adapters)
        return merged.get_base_layer().weight.detach()
    for adapter in adapters:
        weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight


def _renamed(network: Any, weights: Weights) -> Weights:
    """Weights under their checkpoint's names; transformers holds some architectures in another form."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    conversions = getattr(network, "_weight_conversions", None)
    if conversions is None:  # as `revert_weight_conversion` finds them
        found = get_model_conversion_mapping(network, add_legacy=False)
        conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
    if not conversions:
        yield from weights
        return
    # They join and split weights within a layer.
    for _, layer in itertools.groupby(weights, lambda weight: _LAYER.match(weight[0])[0]):  # type: ignore[index]
        yield from revert_weight_conversion(network, dict(layer)).items()


def _buffers(model: nn.Module) -> Weights:
    """Buffers that a checkpoint holds, under the names of :func:`_merged`."""
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_own = ".original_module" not in place and "lora_" not in place
            if is_own and name not in module._non_persistent_buffers_set:
                place = re.sub(r"\.(base_layer|modules_to_save\.\w+)(?=\.|$)", "", place.removeprefix(_LORA))
                yield f"{place}.{name}".lstrip("."), buffer.detach()


def _whole(parameter: Tensor) -> Tensor:
    weight = parameter.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
