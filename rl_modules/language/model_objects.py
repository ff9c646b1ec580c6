"""Models and tokenizers that are given in Python as objects, in place of a directory or hub name."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from rl_modules.common.errors import UsageError

#: Entry of an export's ``tokenizer_config.json`` if ``AutoTokenizer`` would choose a class that splits texts
#: differently.
PLAIN_AUTO_MAP = {"AutoTokenizer": [None, "plain_tokenizer.PlainTokenizer"]}
#: The classes with a head, by the config's class.
CLASSES = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING, "score": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING}


def check_model_object(model: Any, model_config: dict[str, Any] | None) -> None:
    """Refuses objects that are not complete transformers models, and fields that would contradict the model.

    Args:
        model: object given as ``model_name_or_path``.
        model_config: the argument ``model_config``.

    Raises:
        UsageError: names the argument and what to give instead.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = "; give its base model, and adapters by lora={...}" if hasattr(model, "peft_config") else ""
        raise UsageError(f"model_name_or_path is a {kind}; it takes a directory, a hub name or a model of transformers"
                         f"{hint}")  # fmt: skip
    if hasattr(model, "peft_config") or getattr(model, "is_quantized", False):
        raise UsageError(f"model_name_or_path is a {kind} with adapters or quantized weights; give the plain model, "
                         "and adapters by lora={...}")  # fmt: skip
    if model_config:
        raise UsageError(f"model_config={model_config} can't change a model that is given as an object; change "
                         f"model.config before, or give the model's name or folder")  # fmt: skip


def check_folder(name: str, value: Any) -> Any:
    """Refuses a module in place of a directory or hub name, because no checkpoint could hold it."""
    if isinstance(value, nn.Module):
        raise UsageError(f"{name} is a {type(value).__name__}; it takes a directory or hub name: write the model with "
                         "save_pretrained and give the folder")  # fmt: skip
    return value


def copy_of(model: PreTrainedModel, config: Any, head: str, **options: Any) -> PreTrainedModel:
    """Returns a copy of a model with its weights; the original stays unchanged.

    Args:
        model: the other.
        config: of the copy; its class is the other's.
        head: ``causal`` or ``score``; a head that the other lacks is new.
        options: of ``from_pretrained``.
    """
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    cls: Any = CLASSES[head][type(config)]
    made = cls.from_pretrained(None, config=config, state_dict=state, **options)
    if made.can_generate() and model.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    return made


def tokenizer_name(model: PreTrainedModel) -> str:
    """Returns the directory or hub name from which a model was loaded, which also has its tokenizer.

    Raises:
        UsageError: the model was not loaded from a directory or hub name.
    """
    if not model.name_or_path:
        raise UsageError("model_name_or_path is a model that was loaded from no directory, so that its tokenizer is "
                         "not known; give tokenizer_name_or_path, a directory, hub name or tokenizer")  # fmt: skip
    return model.name_or_path


def prepared(tokenizer: Any, name: str) -> PreTrainedTokenizerBase:
    """Returns a tokenizer that can end completions and pad; one without a pad token pads with its EOS token.

    Args:
        tokenizer: of transformers.
        name: where it comes from, for the message.

    Raises:
        UsageError: it is none, or has no EOS token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(f"{name} is a {type(tokenizer).__name__}; it takes a directory, a hub name or a tokenizer of "
                         "transformers")  # fmt: skip
    if tokenizer.eos_token_id is None:
        raise UsageError(f"tokenizer {name!r} has no EOS token, so no completion could end; set eos_token in "
                         "its tokenizer_config.json")  # fmt: skip
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.init_kwargs.get("auto_map") == PLAIN_AUTO_MAP:  # that file stays in the export's folder
        del tokenizer.init_kwargs["auto_map"]
    return tokenizer


def is_name(value: Any) -> bool:
    """Returns whether an argument is a directory or hub name, or left out."""
    return value is None or isinstance(value, str) or hasattr(value, "__fspath__")
