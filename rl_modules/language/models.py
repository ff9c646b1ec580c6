"""Models of transformers: read from a directory or the hub, copied from an object, or built from a config."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl_modules.common.errors import UsageError
from rl_modules.common.named_code import named_code, named_kernels, named_modules, refuse_named
from rl_modules.common.seeding import GLOBAL_GENERATORS
from rl_modules.language import sharding, vision
from rl_modules.language.adapter_folder import is_adapter_folder, merged_directory
from rl_modules.language.architecture import freeze_unread_parts, require_head, transformers_model
from rl_modules.language.fast.kernels import checkpoint_activations
from rl_modules.language.fast.varlen import NAME
from rl_modules.language.frozen_weights import check_sources, describe_sources, source_path
from rl_modules.language.lora import add_lora, plain_adapters, train_in_float32
from rl_modules.language.pretrained import copy_of, directory_of, read_model, require_all_weights, unreadable
from rl_modules.language.quantized import plain_quantization, quantization, require_left_out, require_trainable

if TYPE_CHECKING:
    from rl_modules.language.base import LanguageModule


#: Parts of a model that takes images, which ``freeze`` names.
PARTS = ("vision", "projector", "language")
#: Types of weights.
DTYPES = ("float32", "bfloat16", "float16")
_HEADS = {
    "causal": AutoModelForCausalLM,
    "images": AutoModelForImageTextToText,
    "score": AutoModelForSequenceClassification,
}


def build_models(module: "LanguageModule", sharding: Any) -> None:
    """Builds a module's models, and the description from which a checkpoint builds them again."""
    hp = module.hparams
    config, trainer = module._architecture(), module._trainer
    # New weights are drawn from the datamodule's seed. The global generators keep their state: the CPU's, and that
    # of the device on which Lightning creates tensors.
    device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
    forked = {} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with GLOBAL_GENERATORS, torch.random.fork_rng(**(forked or {"devices": []})):
        torch.manual_seed(getattr(getattr(trainer, "datamodule", None), "seed", 0))
        module.build_model(config, module._source if hp.description is None else frozen_source(module, "model."))
    if hp.lora is not None:
        train_in_float32(module)
    # Where weights are sharded, the first rank alone has read them.
    describe = partial(_described, module, config)
    description, sources = describe() if sharding is None else sharding.of_first_rank(describe)
    if (generation := description.get("generation_config")) is not None:
        transformers_model(module.model).generation_config = without_ignored(GenerationConfig.from_dict(generation))
    module._given_model = None
    module._sources = sources  # of the weights as they were read: a precision may convert them
    if getattr(module.model, "is_quantized", False):
        require_left_out(hp.save_frozen_weights, sharding is not None)
    hp["description"] = {**description, "frozen": {} if hp.save_frozen_weights else sources}


def _described(module: "LanguageModule", config: Any) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Returns the models as plain data, and the sources of frozen weights."""
    known = module.hparams["description"]
    description = module.describe(config) if known is None else known
    arguments: Any = module.frozen_arguments() if known is None else description.get("frozen", {})
    if not arguments:
        return description, {}

    return description, describe_sources(module, arguments) if known is None else check_sources(module, arguments)


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
    freeze: Sequence[str] = (),
) -> Any:
    """Returns the network, with weights of ``model_name_or_path`` or drawn anew (from torch's global generator);
    ``initialize`` changes them before there are adapters. ``freeze`` names parts of a model with the head ``images``.
    """
    require_head(config, head)
    options: dict[str, Any] = {"dtype": getattr(torch, torch_dtype)}
    if attn_implementation is not None:
        options["attn_implementation"] = attention_name(attn_implementation)
    if attn_implementation is None and not isinstance(model_name_or_path, PreTrainedModel):
        refuse_kernels(config)
    config = copy.deepcopy(config)
    if head == "score":
        config.num_labels = 1
    if quantization_config is not None or hasattr(config, "quantization_config"):
        options |= quantization(config, model_name_or_path, quantization_config, lora)
    # Without storage there is nothing to read: another rank reads the weights and scatters them.
    is_empty = torch.get_default_device().type == "meta"
    name = type(model_name_or_path).__name__ if isinstance(model_name_or_path, PreTrainedModel) else model_name_or_path
    found: dict[str, Any] | None = None
    try:
        if model_name_or_path is None or is_empty:
            model = _HEADS[head].from_config(config, **options, trust_remote_code=False)
        elif isinstance(model_name_or_path, PreTrainedModel):
            model = copy_of(model_name_or_path, config, head, **options)
        else:
            model, found = read_model(_HEADS[head], model_name_or_path, config, **options)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise UsageError(unreadable(str(name or config.model_type), error)) from error
    if head == "score" and not isinstance(getattr(model, "score", None), nn.Linear):
        raise UsageError(
            f"a {config.model_type} model has no linear head named score, read at the last token; take a "
            "causal architecture such as Qwen2, Llama, GPT-2 or GPT-NeoX"
        )
    still = partial(vision.freeze_parts, names=freeze) if head == "images" else freeze_unread_parts
    still(model)
    if found is not None:
        require_all_weights(str(name), model, config, found)
    if gradient_checkpointing:
        checkpoint_activations(model, gradient_checkpointing)
    if initialize is not None:
        initialize(model)
    if lora is not None:
        model = add_lora(model, lora, "SEQ_CLS" if head == "score" else "CAUSAL_LM", gradient_checkpointing, still)
    if getattr(model, "is_quantized", False):
        require_trainable(model, lora or {})
    return model


def refuse_kernels(config: PretrainedConfig) -> None:
    """Refuses a file's config, or a part of it, that names an attention kernel of a repository."""
    found = named_kernels(config._attn_implementation)
    refuse_named("the model's config", "attn_implementation", found, "give it again as attn_implementation")
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            refuse_kernels(part)


def attention_name(attn_implementation: str) -> str:
    """Returns the name in transformers of an ``attn_implementation``; ``varlen`` is registered there."""
    if attn_implementation != "varlen":
        return attn_implementation

    return NAME


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all tokens that end a completion: the generation config's, and the tokenizer's."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = named if isinstance(named, list) else [] if named is None else [named]
    return sorted({*listed, tokenizer.eos_token_id})


def frozen_source(module: "LanguageModule", prefix: str) -> str | None:
    """Directory of frozen weights that the loaded checkpoint does not contain; None: it contains them."""
    source = module.hparams["description"].get("frozen", {}).get(prefix)
    if source is None:
        return None

    return source_path(source, module.hparams)


def sharded_strategy(**arguments: Any) -> Any:
    """Makes the strategy that splits weights over ranks."""
    return sharding.ShardedStrategy(**arguments)


for _name in ("fsdp2", "modelparallelstrategy"):  # Lightning asks for names in small letters
    StrategyRegistry.register(_name, sharded_strategy, description="weights split over ranks (FSDP2)")


def adopt_strategy(trainer: L.Trainer | None) -> Any:
    """Returns :mod:`rl_modules.language.sharding` where a strategy splits weights, and replaces that; else None."""
    if trainer is None or not isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
        return None
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


def name_or_object(name: str, value: Any) -> Any:
    """A name, or the object in a tuple, because an attribute would become a part of the module."""
    if isinstance(value, str) and value.endswith(".gguf"):
        return directory_of(value)
    if isinstance(value, str) and is_adapter_folder(value):
        return merged_directory(value)
    return value if value is None or isinstance(value, str) or hasattr(value, "__fspath__") else (value,)


def name_alone(value: Any) -> Any:
    """What a checkpoint holds of that."""
    return None if isinstance(value, tuple) else value


def check_lora(name: str, lora: Any) -> dict[str, Any] | None:
    """Converts the argument ``lora`` to plain data, which a checkpoint can hold."""
    if lora is None:
        return None

    return plain_adapters(name, lora)


def check_parts(name: str, parts: Any) -> list[str] | None:
    """Refuses names of parts that no model has."""
    for part in parts or ():
        if part not in PARTS:
            raise UsageError(f"{name} has {part!r}, which must be one of {', '.join(PARTS)}")
    return None if parts is None else list(parts)


def code_of_adapters(lora: Any) -> Iterator[str]:
    """Yields the names of code in the argument ``lora``: peft imports the module that ``megatron_core`` names."""
    yield from named_code(lora)
    if isinstance(lora, dict):
        yield from named_modules(lora.get("megatron_core"))


def check_quantization(name: str, given: Any) -> dict[str, Any] | None:
    """Converts the argument ``quantization_config`` to plain data, which a checkpoint can hold."""
    if given is None:
        return None

    return plain_quantization(name, given)


def adapters_of(module: "LanguageModule") -> dict[str, Any] | None:
    """Arguments of ``peft.LoraConfig``, without ``lora_dropout`` where the algorithm trains without dropout."""
    lora: dict[str, Any] | None = module.lora
    return lora if lora is None or module.dropout else {**lora, "lora_dropout": 0.0}


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
        rank_zero_warn(
            f"the model's generation config has {settings}, ignored with do_sample={config.do_sample} and "
            f"num_beams={config.num_beams}; exports leave this out"
        )
    return GenerationConfig.from_dict({**config.to_dict(), **dict.fromkeys(ignored)})
