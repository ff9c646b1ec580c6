"""Architectures: configs of transformers with changed fields, their limits, and their rates of dropout."""

import copy
import inspect
from difflib import get_close_matches
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl_modules.common.errors import UsageError, naming
from rl_modules.language.pretrained import CLASSES, read_config

#: The default model: a Qwen2 of 1.06 million parameters with the character tokenizer.
SMALL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
#: Arguments of transformers' ``from_pretrained``, which are no fields of an architecture.
_OF_LOADING = {
    "quantization_config",
    "load_in_4bit",
    "load_in_8bit",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "gradient_checkpointing",
    "device_map",
    "max_memory",
    "low_cpu_mem_usage",
    "offload_folder",
    "trust_remote_code",
    "code_revision",
    "revision",
    "token",
    "cache_dir",
    "subfolder",
    "variant",
    "return_dict",
}


def refuse_loading_arguments(model_config: dict[str, Any] | None) -> None:
    """Refuses arguments of ``from_pretrained`` among the fields of an architecture, which would be ignored."""
    for name in _OF_LOADING.intersection(model_config or {}):
        raise UsageError(
            f"model_config has {name}={(model_config or {})[name]!r}, no field of an architecture; "
            "torch_dtype, attn_implementation, quantization_config and gradient_checkpointing are the "
            "module's own arguments, and a model is downloaded before"
        )


def make_config(
    model_name_or_path: str | PreTrainedModel | None,
    model_config: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    dropout: bool,
) -> PretrainedConfig:
    """Returns the architecture of a directory or hub name, or :data:`SMALL`, with ``model_config``'s changes."""
    fields = dict(model_config or {})
    if isinstance(model_name_or_path, PreTrainedModel):
        config = copy.deepcopy(model_name_or_path.config)
        config.architectures = [type(model_name_or_path).__name__]  # as `save_pretrained` does
    elif model_name_or_path is not None:
        config = read_config(model_name_or_path, fields)
    else:
        if fields.get("model_type", SMALL["model_type"]) == SMALL["model_type"]:
            fields = {**SMALL, **fields}
            fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        kind = fields.pop("model_type")
        special = {
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        with naming(f"model_config with model_type={kind!r}"):
            config = AutoConfig.for_model(kind, **{**special, **fields})
        _complete_text_config(config, fields, special)
    _check_fields(config, fields)
    if dropout:
        restore_dropout(config)  # of a model that reinforcement learning has trained
    else:
        remove_dropout(config)
    words = text_config(config).vocab_size
    if len(tokenizer) > words:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {words}; "
            "give the one that the model was trained with as tokenizer_name_or_path"
        )
    return config


def _check_fields(config: PretrainedConfig, fields: dict[str, Any]) -> None:
    """Refuses misspelled fields, which transformers would ignore; one that resembles none may be optional."""
    try:
        known: Any = type(config)()
    except (TypeError, ValueError):  # some composite configs need their parts
        known = None
    for name in fields.keys() - {REMOVED} if known is not None else ():
        if not hasattr(known, name) and (near := get_close_matches(name, known.to_dict(), n=1, cutoff=0.85)):
            raise UsageError(
                f"model_config has no field {name!r} for model_type={config.model_type}; did you mean {near[0]}?"
            )
    text = text_config(config)
    width, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if isinstance(width, int) and isinstance(heads, int) and width % heads and not getattr(text, "head_dim", None):
        raise UsageError(f"model_config: hidden_size={width} must be divisible by num_attention_heads={heads}")
    layers, kinds = getattr(text, "num_hidden_layers", None), getattr(text, "layer_types", None)
    if isinstance(layers, int) and isinstance(kinds, list) and len(kinds) < layers:
        raise UsageError(
            f"model_config: num_hidden_layers={layers} is more than the {len(kinds)} layers that the "
            "model's layer_types name; leave it as it is"
        )


def body_of(network: Any) -> nn.Module:
    """Returns the part of a transformers model that holds its blocks."""
    body: nn.Module = network.get_decoder() if hasattr(network, "get_decoder") else network.base_model
    return body


def transformers_model(model: Any) -> Any:
    """Returns the transformers model inside of a ``peft`` model, whose adapters are in its layers, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def cache_argument(model: Any) -> str:
    """The argument of a model's forward pass that takes its cache: since transformers 5.24 ``cache``."""
    known = inspect.signature(transformers_model(model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def text_config(config: PretrainedConfig) -> Any:
    """Returns the config of the language model: a part of the config of a model that also takes images or sound."""
    return config.get_text_config(decoder=True)


def _complete_text_config(config: PretrainedConfig, fields: dict[str, Any], special: dict[str, Any]) -> None:
    """Sets the tokenizer's vocabulary size and token ids in a composite config's language model, unless given."""
    text = text_config(config)
    nested = {name for part in fields.values() if isinstance(part, dict) for name in part}
    if text is not config:
        for name in special.keys() - nested:
            setattr(text, name, special[name])


def require_head(config: PretrainedConfig, head: str) -> None:
    """Refuses an architecture that transformers has no such head for, by its name."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UsageError(
            f"{kind} is an encoder-decoder, and every algorithm here reads prompt and completion as one "
            "text; take a decoder-only architecture such as Qwen3, Llama or Gemma"
        )
    if type(config) in CLASSES[head]:
        return
    if head == "images":
        raise UsageError(
            f"the records have images, and transformers has no model of {kind} that reads them with text; take an "
            "architecture such as Qwen3-VL, Gemma 3, SmolVLM or LLaVA, or leave the images out"
        )
    needed = "sequence classification" if head == "score" else "causal language model"
    raise UsageError(
        f"transformers has no {needed} for {kind}; take a decoder-only architecture such as Qwen3, Llama or Gemma"
    )


def max_length(config: PretrainedConfig) -> int:
    """Tokens that the model can take, prompt and completion together.

    Phi-3's ``longrope`` turns all tokens of a batch by other angles once one row passes
    ``original_max_position_embeddings`` (by 2.5 nats). Such a model takes texts up to that length.
    """
    text = text_config(config)
    named = ("max_position_embeddings", "n_positions", "max_seq_len")
    longest = next((value for name in named if (value := getattr(text, name, None))), 2**31)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for all layers, or one per kind
    own = getattr(text, "original_max_position_embeddings", None)
    lengths = [
        kind.get("original_max_position_embeddings") or own for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return int(min([longest, *filter(None, lengths)]))


# ---------------------------------------------------------------- dropout

#: Field of a config with the rates that :func:`remove_dropout` has set to 0; checkpoints hold it with the others.
REMOVED = "removed_dropout"


def remove_dropout(config: PretrainedConfig) -> None:
    """Sets every dropout rate of a config and of its language model's to 0; each stores its original rates."""
    for part in _parts(config):
        rates = {
            name: value
            for name, value in part.to_dict().items()
            if is_rate(name, part) and isinstance(value, float) and value
        }
        for name in rates:
            setattr(part, name, 0.0)
        if rates:
            setattr(part, REMOVED, {**getattr(part, REMOVED, {}), **rates})


def is_rate(name: str, config: PretrainedConfig) -> bool:
    """Whether a config's field is the rate of a random operation of training: dropout, or noise on a router's input."""
    # PhiMoE's decides, in evaluation too, which experts are close enough to the best.
    is_noise = name == "input_jitter_noise" or (name == "router_jitter_noise" and config.model_type != "phimoe")
    return "dropout" in name or name.endswith(("_pdrop", "layerdrop")) or is_noise


def restore_dropout(config: PretrainedConfig) -> bool:
    """Restores the rates that :func:`remove_dropout` set to 0; returns whether there were any."""
    removed = [(part, part.__dict__.pop(REMOVED, {})) for part in _parts(config)]
    for part, rates in removed:
        for name, rate in rates.items():
            setattr(part, name, rate)
    return any(rates for _, rates in removed)


def _parts(config: PretrainedConfig) -> tuple[PretrainedConfig, ...]:
    return config, config.get_text_config(decoder=True)


# ---------------------------------------------------------------- mixtures of experts


def wants_router_loss(model: Any) -> bool:
    """Returns whether the model's config asks for the loss, by ``output_router_logits``."""
    return bool(getattr(text_config(model.config), "output_router_logits", False))


def has_router(model: Any) -> bool:
    """Returns whether the model's config has a field of such a loss."""
    config = text_config(model.config)
    return hasattr(config, "output_router_logits") or hasattr(config, "router_aux_loss_coef")


# ---------------------------------------------------------------- configs in checkpoints


def plain_config(config: PretrainedConfig | GenerationConfig) -> dict[str, Any]:
    """Returns the fields of a transformers config that a checkpoint may contain, those of configs within it too."""
    return _plain_fields(config.to_dict())


def _plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    # The config of a model that also takes images has its language model's config, with non-plain values too.
    named = {key for key, value in fields.items() if isinstance(value, dict) and all(isinstance(k, str) for k in value)}
    parts = {key: _plain_fields(value) if key in named else value for key, value in fields.items()}
    return {key: value for key, value in parts.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Returns whether a checkpoint may hold it: numbers, strings, and lists and dictionaries of them."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def freeze_unread_parts(model: PreTrainedModel) -> None:
    """Freezes image and sound encoders, whose weights get no gradient, which data-parallel strategies refuse."""
    if model.config.get_text_config(decoder=True) is model.config:
        return
    head = getattr(model, "score", None) or model.get_output_embeddings()
    read = {id(p) for part in (model.get_decoder(), head) if part is not None for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of a model's weights: then every rank must call it as often as the others."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
