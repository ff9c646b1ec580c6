"""Models of transformers: read from a directory or the hub, copied from an object, or built from a config."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import require_head

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEADS = {"causal": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}


def make_model(
    config: PretrainedConfig,
    model_name_or_path: str | PreTrainedModel | None = None,
    head: str = "causal",
    torch_dtype: str = "float32",
    attn_implementation: str | None = None,
    gradient_checkpointing: bool | str = False,
    lora: dict[str, Any] | None = None,
    quantization_config: dict[str, Any] | None = None,
    initialize: Callable[[Any], None] | None = None,
) -> Any:
    """Returns the network, with weights of ``model_name_or_path`` or drawn anew (from torch's global generator);
    ``initialize`` changes them before there are adapters.
    """
    require_head(config, head)
    if torch_dtype not in _DTYPES:
        raise UsageError(f"torch_dtype={torch_dtype!r} must be one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": _DTYPES[torch_dtype]}
    if attn_implementation is not None:
        options["attn_implementation"] = attention_name(attn_implementation)
    config = copy.deepcopy(config)
    if head == "score":
        config.num_labels = 1
    if quantization_config is not None or hasattr(config, "quantization_config"):
        from rl_modules.language.quantized import quantization

        options |= quantization(config, model_name_or_path, quantization_config, lora)
    # Without storage there is nothing to read: another rank reads the weights and scatters them.
    is_empty = torch.get_default_device().type == "meta"
    name = type(model_name_or_path).__name__ if isinstance(model_name_or_path, PreTrainedModel) else model_name_or_path
    found: dict[str, Any] | None = None
    try:
        if model_name_or_path is None or is_empty:
            model = _HEADS[head].from_config(config, **options, trust_remote_code=False)
        elif isinstance(model_name_or_path, PreTrainedModel):
            from rl_modules.language.pretrained import copy_of

            model = copy_of(model_name_or_path, config, head, **options)
        else:
            from rl_modules.language.pretrained import read_model

            model, found = read_model(_HEADS[head], model_name_or_path, config, **options)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        from rl_modules.language.pretrained import unreadable

        raise UsageError(unreadable(str(name or config.model_type), error)) from error
    if head == "score" and not isinstance(getattr(model, "score", None), nn.Linear):
        raise UsageError(f"a {config.model_type} model has no linear head named score, read at the last token; take a "
                         "causal architecture such as Qwen2, Llama, GPT-2 or GPT-NeoX")  # fmt: skip
    freeze_unread_parts(model)
    if found is not None:
        from rl_modules.language.pretrained import require_all_weights

        require_all_weights(str(name), model, config, found)
    if gradient_checkpointing:
        from rl_modules.language.fast.kernels import checkpoint_activations

        checkpoint_activations(model, gradient_checkpointing)
    if initialize is not None:
        initialize(model)
    if lora is not None:
        from rl_modules.language.lora import add_lora

        model = add_lora(model, lora, "CAUSAL_LM" if head == "causal" else "SEQ_CLS", gradient_checkpointing)
    if getattr(model, "is_quantized", False):
        from rl_modules.language.quantized import require_trainable

        require_trainable(model, lora or {})
    return model


def attention_name(attn_implementation: str) -> str:
    """Returns the name in transformers of an ``attn_implementation``; ``varlen`` is registered there."""
    if attn_implementation != "varlen":
        return attn_implementation
    from rl_modules.language.fast.varlen import NAME

    return NAME


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all tokens that end a completion: the generation config's, and the tokenizer's."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = named if isinstance(named, list) else [] if named is None else [named]
    return sorted({*listed, tokenizer.eos_token_id})


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


def sharded_strategy(**arguments: Any) -> Any:
    """Makes the strategy that splits weights over ranks."""
    from rl_modules.language.sharding import ShardedStrategy

    return ShardedStrategy(**arguments)


for _name in ("fsdp2", "modelparallelstrategy"):  # Lightning asks for names in small letters
    StrategyRegistry.register(_name, sharded_strategy, description="weights split over ranks (FSDP2)")


def adopt_strategy(trainer: L.Trainer | None) -> Any:
    """Returns :mod:`rl_modules.language.sharding` where a strategy splits weights, and replaces that; else None."""
    if trainer is None or not isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
        return None
    from rl_modules.language import sharding

    sharding.adopt(trainer.strategy)
    return sharding


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Makes float32 the default dtype within the context, whatever a precision plugin has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_folder(name: str, value: Any) -> Any:
    """Refuses a module in place of a directory or hub name, because no checkpoint could hold it."""
    if isinstance(value, nn.Module):
        raise UsageError(f"{name} is a {type(value).__name__}; it takes a directory or hub name: write the model with "
                         "save_pretrained and give the folder")  # fmt: skip
    return value


def is_name(value: Any) -> bool:
    """Returns whether an argument is a directory or hub name, or left out."""
    return value is None or isinstance(value, str) or hasattr(value, "__fspath__")


def without_ignored(config: GenerationConfig) -> GenerationConfig:
    """Returns the config without settings that transformers ignores, such as a temperature without ``do_sample``."""
    try:
        config.validate(strict=True)
        return config
    except ValueError as error:
        refused = str(error)
    ignored = {name: value for name, value in config.to_diff_dict().items() if f"`{name}`:" in refused}
    if ignored:
        settings = ", ".join(f"{name}={value}" for name, value in ignored.items())
        rank_zero_warn(f"the model's generation config has {settings}, ignored with do_sample={config.do_sample} and "
                       f"num_beams={config.num_beams}; exports leave this out")  # fmt: skip
    return GenerationConfig.from_dict({**config.to_dict(), **dict.fromkeys(ignored)})
