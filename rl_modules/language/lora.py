"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: adding adapters, merging them, and checks of their
initialisation.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_modules.common.errors import UsageError, naming
from rl_modules.common.stored_arguments import is_storable
from rl_modules.language.architecture import freeze_unread_parts

#: Fields of a LoraConfig that do not define the adapters; the model's head decides the task type.
_LABELS = ("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path")
#: Parts of the names of parameters that are not used while adapters are switched off.
_SWITCHED = ("lora_", ".modules_to_save.", ".token_adapter.")


def plain_adapters(name: str, lora: Any) -> dict[str, Any]:
    """Converts a ``LoraConfig``, or its arguments, to plain data."""
    if isinstance(lora, dict):
        fields = lora
    else:
        from peft import LoraConfig

        if not isinstance(lora, LoraConfig):
            raise UsageError(
                f"lora is a {type(lora).__name__}; give the arguments of peft.LoraConfig as a dict, such "
                "as {'r': 16, 'lora_alpha': 32}"
            )
        defaults = LoraConfig().to_dict()
        fields = {name: value for name, value in lora.to_dict().items() if value != defaults.get(name)}
    fields = {
        key: sorted(value) if isinstance(value, set) else value for key, value in fields.items() if key not in _LABELS
    }
    for key, value in fields.items():
        if not is_storable(value):
            raise UsageError(
                f"{name}.{key} is a {type(value).__name__}, which no checkpoint can hold; give numbers, "
                "texts, and lists and dicts of them"
            )
    return fields


def refuse_other_adapters(given: dict[str, Any] | None, saved: dict[str, Any] | None) -> None:
    """Refuses a checkpoint with adapters for a module without them, and one without adapters for a module with them."""
    if given is None:
        raise UsageError(
            f"lora=None, but the checkpoint's run trained adapters with lora={saved}; give the same lora, "
            "which the run's config.yaml has"
        )
    raise UsageError(
        f"lora={given}, but the checkpoint's run trained all weights, without adapters; leave lora out, "
        "or begin a new run from an export"
    )


def add_lora(
    model: PreTrainedModel,
    lora: dict[str, Any],
    task_type: str,
    gradient_checkpointing: bool | str,
    freeze: Callable[[Any], None] = freeze_unread_parts,
) -> Any:
    """Freezes the model and adds low-rank adapters; ``freeze`` freezes those of parts that are not trained."""
    from peft import LoraConfig, get_peft_model

    if gradient_checkpointing:
        model.enable_input_require_grads()
    with naming(f"lora={lora} can't be used", AttributeError, NotImplementedError):  # these two of quantized layers
        config = LoraConfig(**{**lora, "task_type": task_type})
        made = get_peft_model(model, config)
    if getattr(config, "target_modules_to_tie", None):
        raise UsageError(
            "lora.ensure_weight_tying=true with adapters on tied layers makes two parameters of one "
            "weight, each with a step of its own; leave it at false, and an export has both"
        )
    freeze(model)  # which has the adapters now; an image encoder's layers have a language model's names
    return made


def refuse_biases_of_16_bits(lora: dict[str, Any], torch_dtype: str, precision: str) -> None:
    """Refuses to train biases, which are in float32 then, of layers whose weights have 16 bits."""
    bias = lora.get("bias", "none")
    half = torch_dtype != "float32"
    if bias != "none" and (half or precision in ("bf16-true", "16-true")):
        given = f"torch_dtype={torch_dtype}" if half else f"trainer.precision={precision}"
        raise UsageError(
            f"lora.bias={bias!r} trains biases in float32, which the layers of {given} can't add; give "
            "torch_dtype=float32 and trainer.precision=bf16-mixed, or lora.bias='none'"
        )


def train_in_float32(module: nn.Module) -> None:
    """Keeps layers that train whole on a frozen base of 16 bits in float32, where peft takes the base's dtype."""
    from peft.utils import ModulesToSaveWrapper

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    heads = [head for model in models for head in (model.get_output_embeddings(), getattr(model, "score", None))]
    for wrapper in module.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for layer in wrapper.modules_to_save.values():
                layer.register_forward_pre_hook(_take_own_dtype)
                if not any(wrapper is head for head in heads):  # logits and scores stay in float32
                    layer.register_forward_hook(partial(_give_dtype_of, wrapper.original_module))


def _take_own_dtype(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts the inputs to the dtype of the layer's weights; autocast does this by itself."""
    dtype = next(layer.parameters()).dtype
    return tuple(x.to(dtype) if _needs_cast(x) else x for x in arguments)


def _give_dtype_of(original: nn.Module, layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    """Converts the output to the dtype of the base model."""
    return output.to(next(original.parameters()).dtype) if _needs_cast(output) else output


def _needs_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not torch.is_autocast_enabled(x.device.type)


# -------------------------------------------------------------------- merging


def merged(model: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Returns a copy of a model with merged adapters, added in ``dtype``; None: in that of its weights.

    A tied output layer is a weight of its own if it differs.
    """
    if getattr(model, "is_quantized", False):
        model = with_plain_weights(model)
    else:
        model = copy.deepcopy(model)
    model = model if dtype is None else model.to(dtype)
    network = model.get_base_model()
    if adapts_tied_weight(network):
        head = _base_layer(network.get_output_embeddings())
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        for config in (network.config, network.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
    return model.merge_and_unload()


def adapts_tied_weight(network: PreTrainedModel) -> bool:
    """Returns whether the output layer and the embedding share a weight that adapters change for one of them only."""
    layers = [network.get_output_embeddings(), network.get_input_embeddings()]
    if any(layer is None for layer in layers):
        return False
    weights = [getattr(_base_layer(layer), "weight", None) for layer in layers]
    # peft trains tokens of both layers together if their lists are equal.
    tokens = getattr(layers[0], "token_adapter", None)
    is_parted = any(_has_delta(layer) for layer in layers) or (tokens is not None and not tokens.tied_adapter)
    return weights[0] is not None and weights[0] is weights[1] and is_parted


def _base_layer(layer: Any) -> Any:
    layer = getattr(layer, "token_adapter", layer)
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _has_delta(layer: Any) -> bool:
    return hasattr(layer, "get_delta_weight")


# -------------------------------------------------------------------- the start


@torch.no_grad()
def begins_unchanged(model: Any) -> bool:
    """Whether new adapters leave the model's function as it was; ``pissa`` and ``olora`` change the base too."""
    return all(
        not delta.any() or bool(delta.abs().max() <= max(1e-4, 4 * torch.finfo(weight.dtype).eps) * weight.abs().max())
        for delta, weight in _changes(model)
    )


def _changes(model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the change that adapters add to each weight, and the weight."""
    for layer in model.modules():
        if _has_delta(layer):
            weight = layer.get_param() if hasattr(layer, "get_param") else layer.weight
            for adapter in layer.active_adapters:
                yield layer.get_delta_weight(adapter), weight


def check_switched_off(model: Any, lora: dict[str, Any]) -> None:
    """Warns of adapters whose model without them is not the policy at its start, throughout the run."""
    remedy = "a reference of its own by ref_model_name_or_path"
    if not begins_unchanged(model):
        value = lora.get("init_lora_weights", True)
        rank_zero_warn(
            f"lora.init_lora_weights={value!r} begins with adapters that change the policy, and the "
            f"reference is the policy without them: the KL does not begin at 0; leave it at true, or give "
            f"{remedy}"
        )
    trained = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(part in name for part in _SWITCHED)
    ]
    if trained:
        rank_zero_warn(
            f"lora.bias={lora.get('bias', 'none')!r} trains {len(trained)} weights of the base, such as "
            f"{trained[0].removeprefix('base_model.model.')}, which the reference, the policy without its "
            f"adapters, shares: it moves with the policy; set bias=none, or give {remedy}"
        )


def with_plain_weights(model: Any) -> Any:
    """Returns a copy of a model with adapters whose base has, in place of quantized weights, those they stand for."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    network = copy.deepcopy(model).unload()
    if network.quantization_method == "torchao":
        for layer in network.modules():
            if type(getattr(layer, "weight", None)).__module__.startswith("torchao."):
                layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        network.hf_quantizer.remove_quantization_config(network)
    else:
        network = network.dequantize()
    network._weight_conversions = [  # those of files with quantized weights can't be reversed
        conversion
        for conversion in network._weight_conversions or []
        if not any("integrations" in type(step).__module__ for step in getattr(conversion, "operations", ()))
    ]
    plain = get_peft_model(network, copy.deepcopy(model.peft_config["default"]))
    set_peft_model_state_dict(plain, get_peft_model_state_dict(model))
    return plain
