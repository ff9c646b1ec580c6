"""Quantized base models under LoRA (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes or torchao."""

import json
from importlib.util import find_spec
from typing import Any

from transformers import PretrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from rl_modules.common.errors import UsageError, naming
from rl_modules.language.lora import begins_unchanged

#: Methods whose weights adapters can be trained on and merged into.
_TRAINABLE = ("bitsandbytes", "torchao")
#: Methods that transformers dequantizes while it reads the weights.
_READ_AS_PLAIN = ("mxfp4", "fp8", "gguf")


def plain_quantization(name: str, given: Any) -> dict[str, Any] | None:
    """Converts a ``BitsAndBytesConfig`` or ``TorchAoConfig``, or its arguments, to plain data with its method."""
    if given is None:
        return None
    fields = given.to_dict() if isinstance(given, QuantizationConfigMixin) else given
    try:
        fields = json.loads(json.dumps(fields))
    except TypeError:
        fields = None
    if not isinstance(fields, dict):
        raise UsageError(
            f"{name} is a {type(given).__name__}; give the arguments of BitsAndBytesConfig or "
            "TorchAoConfig as a dict, such as {'load_in_4bit': True}"
        )
    if "quant_method" not in fields and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        fields["quant_method"] = "bitsandbytes"
    if fields.get("quant_method") not in _TRAINABLE:
        raise UsageError(
            f"{name}={fields} must set load_in_4bit or load_in_8bit of bitsandbytes, or "
            "quant_method=torchao with a quant_type such as Int8WeightOnlyConfig"
        )
    return fields


def quantization(config: PretrainedConfig, source: Any, given: Any, lora: Any) -> dict[str, Any]:
    """Returns the argument with which ``from_pretrained`` quantizes a model; none for quantized and plain files.

    Args:
        config: of the model.
        source: directory or hub name of the weights.
        given: the argument ``quantization_config``.
        lora: the adapters' arguments.

    Raises:
        UsageError: a model that can't be trained, or a package is missing.
    """
    own = getattr(config, "quantization_config", None)
    own = own.to_dict() if isinstance(own, QuantizationConfigMixin) else own or {}
    found = "bitsandbytes" if own.get("load_in_4bit") or own.get("load_in_8bit") else own.get("quant_method", "")
    method = str(getattr(found, "value", found)).lower()
    if given is None and (not method or method in _READ_AS_PLAIN):
        return {}
    what = (
        f"model_name_or_path={source!r} has weights quantized by {method}" if method else f"quantization_config={given}"
    )
    if lora is None:
        raise UsageError(
            f"{what}: quantized weights can't be trained, and adapters on them can; give lora, such as "
            "lora={'r': 16, 'lora_alpha': 32}, or the model before quantization"
        )
    if method and (given is not None or method not in _TRAINABLE):
        raise UsageError(
            f"{what}, which takes no quantization_config and no adapters unless by "
            f"{' or '.join(_TRAINABLE)}; give the model before quantization"
        )
    if not isinstance(source, str):
        raise UsageError(
            f"{what} quantizes weights that are read from files; give a directory or hub name as "
            "model_name_or_path, such as one that save_pretrained wrote"
        )
    package = method or (given or {})["quant_method"]
    if find_spec(package) is None:
        raise UsageError(f"{what} needs a package that is not installed: pip install 'lightning-rl-recipes[quantized]'")
    with naming(f"{what} can't be used", KeyError, AssertionError, ImportError):
        return {} if given is None else {"quantization_config": _config_of(dict(given))}


def _config_of(fields: dict[str, Any]) -> QuantizationConfigMixin:
    """Returns transformers' object; a ``quant_type`` in one word names a config of torchao, with its defaults."""
    if isinstance(kind := fields.get("quant_type"), str):
        from torchao import quantization
        from torchao.core.config import AOBaseConfig, config_to_dict

        named = getattr(quantization, kind, None)
        if not (isinstance(named, type) and issubclass(named, AOBaseConfig)):
            raise ValueError(f"torchao.quantization has no config of the name {kind}")
        fields["quant_type"] = {"default": config_to_dict(named())}
    return AutoQuantizationConfig.from_dict(fields)


def require_left_out(saved: bool, sharded: bool) -> None:
    """Refuses settings under which a run could not be stored: a checkpoint has the path of quantized weights only."""
    for is_set, setting in ((saved, "save_frozen_weights=true"), (sharded, "a strategy that splits weights")):
        if is_set:
            raise UsageError(
                f"quantized weights can't be used with {setting}: a checkpoint holds the adapters and the "
                "path of the base; leave that out"
            )


def require_trainable(model: Any, lora: dict[str, Any]) -> None:
    """Refuses a quantized model whose method or adapters can't be trained; ``model`` has the adapters."""
    for layer in model.modules():
        # On a CPU, bitsandbytes' first pass in evaluation rounds scales to 16 bits for a product without a gradient.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    if not model.hf_quantizer.is_trainable:
        raise UsageError(
            f"quantization_config={model.config.quantization_config.to_dict()} has no gradient for "
            "adapters; take load_in_4bit or load_in_8bit of bitsandbytes"
        )
    if not begins_unchanged(model):
        raise UsageError(
            f"lora.init_lora_weights={lora.get('init_lora_weights')!r} moves a part of the weights into "
            "the adapters, which a quantized base can't give; leave it at true"
        )
