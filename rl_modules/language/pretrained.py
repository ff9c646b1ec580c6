"""Pretrained models and their tokenizers: read from files, GGUF among them, or copied from an object."""

import copy
import hashlib
import os
import pickle
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from rl_modules.common.errors import UsageError

#: The classes with a head, by the config's class.
CLASSES = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING,
    "images": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "score": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}

#: Tokenizer classes that follow their ``tokenizer.json``, by the names in ``tokenizer_config.json``.
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")

#: Entry of an export's ``tokenizer_config.json`` if ``AutoTokenizer`` would choose a class that splits texts
#: differently.
PLAIN_AUTO_MAP = {"AutoTokenizer": [None, "plain_tokenizer.PlainTokenizer"]}


def read_config(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    """Returns the architecture of a directory or hub name, with some fields changed."""
    try:
        return AutoConfig.from_pretrained(name, **fields, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        refuse_no_model(name)
        raise UsageError(unreadable(name, error)) from error


def prepared(tokenizer: Any, name: str) -> PreTrainedTokenizerBase:
    """Returns a tokenizer that can end completions and pad; one without a pad token pads with its EOS token."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"{name} is a {type(tokenizer).__name__}; it takes a directory, a hub name or a tokenizer of transformers"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"tokenizer {name!r} has no EOS token, so no completion could end; set eos_token in "
            "its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.init_kwargs.get("auto_map") == PLAIN_AUTO_MAP:  # that file stays in the export's folder
        del tokenizer.init_kwargs["auto_map"]
    return tokenizer


def tokenizer_from_dict(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """The inverse of :func:`tokenizer_to_dict`."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder).resolve())
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:
            raise UsageError(
                "the checkpoint's tokenizer can't be read, or needs code of its own, which is never run; "
                "train with tokenizer_name_or_path, one that transformers has"
            ) from error


def write_files(files: Mapping[str, str], root: Path) -> None:
    """Writes a checkpoint's files of a tokenizer or processor into the folder ``root``, and nowhere else."""
    for name, text in files.items():
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise UsageError(f"the checkpoint's tokenizer has a file {name!r}, which lies outside of its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))


def read_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model directory or hub name."""
    try:
        # For some types of models, such as Qwen2, AutoTokenizer takes a class that replaces the file's pre-tokenizer.
        is_plain = get_tokenizer_config(name_or_path).get("tokenizer_class") in _PLAIN
        kind = PreTrainedTokenizerFast if is_plain else AutoTokenizer
        tokenizer = kind.from_pretrained(name_or_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        if name_or_path.count("/") != 1 and "/" in name_or_path and not Path(name_or_path).exists():
            raise UsageError(
                f"there is no model directory {name_or_path}; if an earlier stage writes it, run that "
                "first (the config's header says how), else give another with --model.model_name_or_path"
            ) from error
        refuse_no_model(name_or_path)
        if needs_own_code(error):
            raise UsageError(
                f"tokenizer {name_or_path!r} needs code of its own, and code of a model directory is "
                "never run; give one that transformers has, for a policy as tokenizer_name_or_path"
            ) from error
        raise UsageError(
            f"tokenizer {name_or_path!r} can't be loaded ({_first_line(error)}); give a directory with a "
            "tokenizer.json, or a hub name that is reachable or cached, as tokenizer_name_or_path"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without its files
        raise UsageError(
            f"tokenizer {name_or_path!r} has no vocabulary: the model's folder is without a "
            "tokenizer.json; save the tokenizer there, or give tokenizer_name_or_path"
        )
    return tokenizer


def read_model(auto_class: Any, name: str, config: PretrainedConfig, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model with the weights of files."""
    try:
        # Weights of other shapes are among what was found; without the option they are a RuntimeError.
        found: tuple[Any, dict[str, Any]] = auto_class.from_pretrained(
            name,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **options,
        )
    except pickle.UnpicklingError as error:
        raise ValueError("its pytorch_model.bin holds code, or is damaged, and code is never run") from error
    except (RuntimeError, LookupError, TypeError, EOFError) as error:  # what damaged files and indices lead to
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return found


def require_all_weights(name: str, model: nn.Module, config: PretrainedConfig, found: dict[str, Any]) -> None:
    """Refuses files that lack weights that process text; a causal model's new reward head may be missing."""
    if shapes := sorted(found["mismatched_keys"]):
        weight, theirs, ours = shapes[0]
        raise UsageError(
            f"model_name_or_path={name!r} has {weight} of shape {tuple(theirs)}, its config of "
            f"{tuple(ours)}; leave the sizes of its weights as they are in model_config"
        )
    unread = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    is_trained = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or [])
    lacking = sorted(key for key in set(found["missing_keys"]) - unread if is_trained or not key.startswith("score."))
    if not lacking:
        return
    others = sorted(found["unexpected_keys"])
    instead = f" and has {others[0]}, which the model has not" if others else ""
    raise UsageError(
        f"model_name_or_path={name!r} lacks {len(lacking)} of the model's weights, such as {lacking[0]}"
        f"{instead}; write the model anew with save_pretrained, or leave model_name_or_path out for new "
        "weights"
    )


def refuse_no_model(name: str) -> None:
    """Refuses a checkpoint, and a directory of PEFT's adapters, which lack the model that they belong to."""
    if name.endswith(".ckpt") and Path(name).is_file():
        raise UsageError(
            f"{name!r} is a checkpoint, and a model is a directory; write one with `rl export --ckpt_path "
            f"{name} --output FOLDER`, and give FOLDER"
        )
    config = Path(name, "adapter_config.json")
    if config.is_file():
        scores = '"SEQ_CLS"' in config.read_text(encoding="utf-8")
        load = (
            f"AutoPeftModelForSequenceClassification.from_pretrained({name!r}, num_labels=1)"
            if scores
            else f"AutoPeftModelForCausalLM.from_pretrained({name!r})"
        )
        raise UsageError(
            f"{name!r} holds adapters of PEFT without their model; merge them first, {load}."
            "merge_and_unload().save_pretrained(FOLDER), and give FOLDER; lora={...} trains new ones from "
            "there"
        )


def unreadable(name: str, error: Exception) -> str:
    """The sentence about a model that can't be loaded."""
    if needs_own_code(error):
        return (
            f"model_name_or_path={name!r} needs code of its own, and code of a model directory is never run; give "
            "a model whose architecture transformers has"
        )
    reason = _first_line(error)
    if Path(name).is_dir():
        return f"model_name_or_path={name!r} can't be loaded ({reason}); it needs a config.json and model.safetensors"
    if "attention" in reason.lower() or "varlen" in reason:  # a model with classes of its own: KeyError
        return f"attn_implementation can't be used with model {name!r} ({reason}); give eager or sdpa"
    return (
        f"model {name!r} can't be loaded ({reason}); without network give the path of a downloaded directory "
        "instead of a hub name"
    )


def needs_own_code(error: Exception) -> bool:
    """Returns whether transformers' error says that a model or tokenizer needs custom Python code."""
    return "custom code" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# ---------------------------------------------------------------- models given as objects


def check_model_object(model: Any, model_config: dict[str, Any] | None) -> None:
    """Refuses objects that are not complete transformers models, and fields that would contradict the model."""
    kind = type(model).__name__
    is_plain = not hasattr(model, "peft_config") and not getattr(model, "is_quantized", False)
    if not isinstance(model, PreTrainedModel) or not is_plain:
        raise UsageError(
            f"model_name_or_path is a {kind}{'' if is_plain else ' with adapters or quantized weights'}; it takes a "
            "directory, a hub name or a plain model of transformers, whose adapters are given by lora={...}"
        )
    if model_config:
        raise UsageError(
            f"model_config={model_config} can't change a model that is given as an object; change "
            f"model.config before, or give the model's name or folder"
        )


def copy_of(model: PreTrainedModel, config: Any, head: str, **options: Any) -> PreTrainedModel:
    """Returns a copy of a model with its weights; the original stays unchanged."""
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    cls: Any = CLASSES[head][type(config)]
    made = cls.from_pretrained(None, config=config, state_dict=state, **options)
    if made.can_generate() and model.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    return made


def tokenizer_name(model: PreTrainedModel) -> str:
    """Returns the directory or hub name from which a model was loaded, which also has its tokenizer."""
    if not model.name_or_path:
        raise UsageError(
            "model_name_or_path is a model that was loaded from no directory, so that its tokenizer is "
            "not known; give tokenizer_name_or_path, a directory, hub name or tokenizer"
        )
    return model.name_or_path


# ---------------------------------------------------------------- GGUF files


def directory_of(name: str) -> str:
    """Returns the cached directory of a GGUF file, a path or ``package/file.gguf``: weights in single precision,
    tokenizer.

    Only data is read: a package that holds the file is not imported.
    """
    file, package = Path(name), name.partition("/")[0]
    if not file.is_file() and package.isidentifier() and (spec := find_spec(package)) is not None:
        places = spec.submodule_search_locations or []
        file = next((path for place in places if (path := Path(place, *file.parts[1:])).is_file()), file)
    if not file.is_file():
        raise UsageError(
            f"model_name_or_path={name!r} is no file, and no installed package {package!r} has it; give "
            "the path of a .gguf file, or install the package"
        ) from None
    try:
        import gguf  # noqa: F401 - transformers reads the file by it
        from huggingface_hub.constants import HF_HOME
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise UsageError(
            f"model_name_or_path={name!r} needs a package that is not installed: pip install {error.name}"
        ) from error
    known = hashlib.sha256(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()
    folder = Path(HF_HOME) / "gguf" / f"{file.stem}-{known[:12]}"
    if folder.is_dir():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place, "made")
        try:
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise UsageError(
                f"model_name_or_path={name!r} can't be read: {' '.join(str(error).split())[:200]}"
            ) from error
        # transformers does not save what it has read from such a file, because it takes it for quantized still.
        if hasattr(read.config, "quantization_config"):
            del read.config.quantization_config
        model = type(read)(read.config)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(made)
        if not folder.is_dir():  # another process may have been faster
            os.replace(made, folder)
    return str(folder)
