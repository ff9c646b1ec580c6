"""Transformers: read from a directory or the hub, or built from a config; LoRA; export."""

import copy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl_modules.common.errors import UsageError
from rl_modules.language.dropout import REMOVED, original_dropout, remove_dropout, restore_dropout
from rl_modules.language.lora import add_lora, freeze_unread_parts, merged, refuse_no_model
from rl_modules.language.model_objects import CLASSES, copy_of
from rl_modules.language.sharding import is_sharded, whole
from rl_modules.language.tokenizer import export_tokenizer, needs_own_code
from rl_modules.language.weight_files import read_model, require_all_weights

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
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Operations whose results selective checkpointing keeps.
_PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]  # fmt: skip
_NOT_QUANTIZED = ("weights are not quantized here; torch_dtype=bfloat16 halves them, and lora trains adapters "
                  "only")  # fmt: skip
#: Arguments of transformers' ``from_pretrained``, which are no fields of an architecture, and what to use here.
_OF_LOADING = {
    **dict.fromkeys(("quantization_config", "load_in_4bit", "load_in_8bit"), _NOT_QUANTIZED),
    **dict.fromkeys(("dtype", "torch_dtype"), "the module's argument torch_dtype sets it"),
    "attn_implementation": "the module's argument of that name sets it",
    "gradient_checkpointing": "the module's argument of that name sets it",
    **dict.fromkeys(("device_map", "max_memory", "low_cpu_mem_usage", "offload_folder"),
                    "the Trainer's devices and strategy place the weights"),
    **dict.fromkeys(("trust_remote_code", "code_revision"), "code of a model directory is never run"),
    **dict.fromkeys(("revision", "token", "cache_dir", "subfolder", "variant"),
                    "download the model, and give its directory as model_name_or_path"),
    "return_dict": "the algorithms read results by name",
}  # fmt: skip
_HEADS = {"causal": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}


def refuse_loading_arguments(model_config: dict[str, Any] | None) -> None:
    """Refuses arguments of transformers' ``from_pretrained`` among the fields of an architecture, where they would be
    ignored.

    Raises:
        UsageError: names the argument and what to use here.
    """
    for name in (model_config or {}).keys() & _OF_LOADING.keys():
        raise UsageError(f"model_config has {name}={(model_config or {})[name]!r}, no field of an architecture: "
                         f"{_OF_LOADING[name]}")  # fmt: skip


def make_config(
    model_name_or_path: str | PreTrainedModel | None,
    model_config: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    dropout: bool,
) -> PretrainedConfig:
    """Returns the architecture of a directory or hub name, or :data:`SMALL`, with ``model_config``'s changes.

    Args:
        model_name_or_path: directory, hub name, or a model that has it; None: from scratch.
        model_config: fields that differ; another ``model_type`` brings that type's own defaults instead.
        tokenizer: gives a model from scratch its vocabulary and special tokens.
        dropout: False sets every dropout rate of the config to 0; an export has the original ones.

    Raises:
        UsageError: the config can't be read or needs code of its own, a type is unknown, or the tokenizer has tokens
            that the model lacks.
    """
    fields = dict(model_config or {})
    if isinstance(model_name_or_path, PreTrainedModel):
        config = copy.deepcopy(model_name_or_path.config)
        config.architectures = [type(model_name_or_path).__name__]  # as `save_pretrained` does
    elif model_name_or_path is not None:
        try:
            config = AutoConfig.from_pretrained(model_name_or_path, **fields, trust_remote_code=False)
        except (OSError, ValueError, KeyError, RecursionError) as error:
            refuse_no_model(model_name_or_path)
            raise UsageError(_unreadable(model_name_or_path, error)) from error
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
        try:
            config = AutoConfig.for_model(kind, **{**special, **fields})
        except ValueError as error:
            raise UsageError(f"model_config has model_type={kind!r}, which transformers does not know") from error
        _complete_text_config(config, fields, special)
    _check_fields(config, fields)
    if dropout:
        restore_dropout(config)  # of a model that reinforcement learning has trained
    else:
        remove_dropout(config)
    words = text_config(config).vocab_size
    if len(tokenizer) > words:
        raise UsageError(f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {words}; "
                         "give the one that the model was trained with as tokenizer_name_or_path")  # fmt: skip
    return config


def _check_fields(config: PretrainedConfig, fields: dict[str, Any]) -> None:
    """Refuses misspelled fields, which transformers would keep and ignore.

    A field that resembles none of the architecture's fields may be an optional one, such as ``head_dim``.

    Raises:
        UsageError: names the field, or widths that do not fit together.
    """
    try:
        known: Any = type(config)()
    except (TypeError, ValueError):  # some composite configs need their parts
        known = None
    for name in fields.keys() - {REMOVED} if known is not None else ():
        if not hasattr(known, name) and (near := get_close_matches(name, known.to_dict(), n=1, cutoff=0.85)):
            raise UsageError(f"model_config has no field {name!r} for model_type={config.model_type}; did you mean "
                             f"{near[0]}?")  # fmt: skip
    text = text_config(config)
    width, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if isinstance(width, int) and isinstance(heads, int) and width % heads and not getattr(text, "head_dim", None):
        raise UsageError(f"model_config: hidden_size={width} must be divisible by num_attention_heads={heads}")
    layers, kinds = getattr(text, "num_hidden_layers", None), getattr(text, "layer_types", None)
    if isinstance(layers, int) and isinstance(kinds, list) and len(kinds) < layers:
        raise UsageError(f"model_config: num_hidden_layers={layers} is more than the {len(kinds)} layers that the "
                         "model's layer_types name; leave it as it is")  # fmt: skip


def text_config(config: PretrainedConfig) -> Any:
    """Returns the config of the language model: a part of the config of a model that also takes images or sound."""
    return config.get_text_config(decoder=True)


def _complete_text_config(config: PretrainedConfig, fields: dict[str, Any], special: dict[str, Any]) -> None:
    """Sets the tokenizer's vocabulary size and token ids in a composite config's language model, except those in
    ``fields``.
    """
    text = text_config(config)
    nested = {name for part in fields.values() if isinstance(part, dict) for name in part}
    if text is not config:
        for name in special.keys() - nested:
            setattr(text, name, special[name])


def make_model(
    config: PretrainedConfig,
    model_name_or_path: str | PreTrainedModel | None = None,
    head: str = "causal",
    torch_dtype: str = "float32",
    attn_implementation: str | None = None,
    gradient_checkpointing: bool | str = False,
    lora: dict[str, Any] | None = None,
) -> Any:
    """Returns the network, with weights of ``model_name_or_path`` or drawn anew (from torch's global generator).

    Args:
        config: the architecture.
        model_name_or_path: where the weights come from: a directory, hub name or model; None: new ones.
        head: ``causal`` (logits over the vocabulary) or ``score`` (one number per sequence).
        torch_dtype: of the weights: float32, bfloat16 or float16.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2`` …; None: the library's choice.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them: True, all of every
            layer; ``selective``, all but matrix products and attention.
        lora: arguments of ``peft.LoraConfig`` (``r``, ``lora_alpha``, ``target_modules`` …); None: all weights train.

    Raises:
        UsageError: an architecture without such a head or whose score is not read at the last token, a directory
            without all of the weights, a hub that is out of reach, an unknown dtype or way of checkpointing.
    """
    require_head(config, head)
    if torch_dtype not in _DTYPES:
        raise UsageError(f"torch_dtype={torch_dtype!r} must be one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": _DTYPES[torch_dtype]}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    config = copy.deepcopy(config)
    if head == "score":
        config.num_labels = 1
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
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UsageError(_unreadable(str(name or config.model_type), error)) from error
    if head == "score" and not isinstance(getattr(model, "score", None), nn.Linear):
        raise UsageError(f"a {config.model_type} model has no linear head named score, read at the last token; take a "
                         "causal architecture such as Qwen2, Llama, GPT-2 or GPT-NeoX")  # fmt: skip
    freeze_unread_parts(model)
    if found is not None:
        require_all_weights(str(name), model, config, found)
    checkpoint_activations(model, gradient_checkpointing)
    if lora is not None:
        model = add_lora(model, lora, "CAUSAL_LM" if head == "causal" else "SEQ_CLS", gradient_checkpointing)
    return model


def require_head(config: PretrainedConfig, head: str) -> None:
    """Refuses an architecture that transformers has no such head for, by its name.

    Args:
        config: the architecture.
        head: ``causal`` or ``score``, see :func:`make_model`.

    Raises:
        UsageError: an encoder-decoder, or a type without causal language model or sequence classification.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UsageError(f"{kind} is an encoder-decoder, and every algorithm here reads prompt and completion as one "
                         "text; take a decoder-only architecture such as Qwen3, Llama or Gemma")  # fmt: skip
    if type(config) in CLASSES[head]:
        return
    if head == "score":
        raise UsageError(f"transformers has no sequence classification for {kind}, so that no reward or value model "
                         "can be made of it; take an architecture such as Qwen3, Llama, Gemma or GPT-NeoX")  # fmt: skip
    raise UsageError(f"transformers has no causal language model for {kind}; take a decoder-only architecture such as "
                     "Qwen3, Llama or Gemma")  # fmt: skip


def checkpoint_activations(model: PreTrainedModel, how: bool | str) -> None:
    """Makes the backward pass recompute a layer's activations instead of keeping them.

    Args:
        model: of transformers.
        how: False: keep everything; True: keep nothing but each layer's input (Chen et al. 2016, arXiv:1604.06174);
            ``selective``: keep the results of matrix products and attention; the rest is cheap to recompute.

    Raises:
        UsageError: another value.
    """
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


def export_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Writes a Hugging Face directory: safetensors, config, generation config, tokenizer. LoRA is merged in.

    An output layer that is tied to the embedding is written as a separate weight if adapters make the two differ. The
    generation config names the tokenizer's EOS token, with which training ended completions, beside its own. The config
    has the model's dropout rates, which reinforcement learning sets to 0.

    Args:
        model: a transformers model, or one with LoRA. Where its weights are sharded all ranks call this, the first
            writes, and none returns before.
        tokenizer: saved beside it, such that ``AutoTokenizer`` reads texts as in training.
        folder: made if it does not exist.

    Returns:
        The folder; ``from_pretrained`` loads it.

    Raises:
        UsageError: adapters on sharded weights, which can't be merged in.
    """
    if is_sharded(model):
        return _export_sharded(model, tokenizer, Path(folder))
    if hasattr(model, "merge_and_unload"):
        model = merged(model)
    folder = Path(folder)
    _name_eos_token(model, tokenizer)
    with original_dropout(model.config):
        model.save_pretrained(folder)
    export_tokenizer(tokenizer, folder)
    return folder


def _export_sharded(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    if hasattr(model, "merge_and_unload"):
        raise UsageError(f"adapters can't be merged into sharded weights for {folder}; write a checkpoint, and then "
                         "`rl export --ckpt_path` in one process")  # fmt: skip
    writes = torch.distributed.get_rank() == 0
    state = whole(model.state_dict(keep_vars=True), keep=writes)
    if writes:
        _name_eos_token(model, tokenizer)
        with original_dropout(model.config):
            model.save_pretrained(folder, state_dict=state)
        export_tokenizer(tokenizer, folder)
    torch.distributed.barrier()
    return folder


def _name_eos_token(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the tokenizer's EOS token to a generation config without it: ``generate`` would not stop there."""
    config = getattr(model, "generation_config", None)
    stops = eos_token_ids(model, tokenizer)
    if config is not None and config.eos_token_id not in (stops, stops[0]):
        config.eos_token_id = stops if len(stops) > 1 else stops[0]


def max_length(config: PretrainedConfig) -> int:
    """Tokens that the model can take, prompt and completion together.

    Phi-3's long rotary embedding (``longrope``) turns every token of a batch by other angles once the longest row
    passes ``original_max_position_embeddings``, so that a text's log-probabilities would depend on the texts beside it
    (by 2.5 nats on Phi-3). Such a model takes texts up to that length.
    """
    text = text_config(config)
    named = ("max_position_embeddings", "n_positions", "max_seq_len")
    longest = next((value for name in named if (value := getattr(text, name, None))), 2**31)
    return int(min([longest, *_lengths_of_longrope(text)]))


def _lengths_of_longrope(text: Any) -> list[int]:
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for all layers, or one per kind
    own = getattr(text, "original_max_position_embeddings", None)
    lengths = [kind.get("original_max_position_embeddings") or own for kind in kinds
               if kind.get("rope_type") == "longrope"]  # fmt: skip
    return [length for length in lengths if length]


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all tokens that end a completion: the generation config's, and the tokenizer's."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = named if isinstance(named, list) else [] if named is None else [named]
    return sorted({*listed, tokenizer.eos_token_id})


def _unreadable(name: str, error: Exception) -> str:
    if needs_own_code(error):
        return (f"model_name_or_path={name!r} needs code of its own, and code of a model directory is never run; give "
                "a model whose architecture transformers has")  # fmt: skip
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if Path(name).is_dir():
        return f"model_name_or_path={name!r} can't be loaded ({reason}); it needs a config.json and model.safetensors"
    if "attention" in reason.lower():
        return f"attn_implementation can't be used with model {name!r} ({reason}); give eager or sdpa"
    return (f"model {name!r} can't be loaded ({reason}); without network give the path of a downloaded directory "
            "instead of a hub name")  # fmt: skip
