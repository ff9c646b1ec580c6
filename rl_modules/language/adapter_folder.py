"""Folders of peft's adapters: written for a model, and read as a model with the adapters merged in."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice

#: The file by which a folder of adapters is known.
CONFIG = "adapter_config.json"


def is_adapter_folder(name: str) -> bool:
    """Whether a folder has adapters without the model that they belong to."""
    return Path(name, CONFIG).is_file() and not Path(name, "config.json").exists()


def merged_directory(name: str) -> str:
    """Returns the cached directory of a model: the adapters' base in float32, with the adapters merged in.

    What the adapters add may be less than 16 bits tell apart. Only data is read: ``adapter_config.json`` names a
    directory or hub name, and no code.
    """
    files = [Path(name, file) for file in (CONFIG, "adapter_model.safetensors")]
    try:
        config = json.loads(files[0].read_text("utf-8"))
        base, kind = config["base_model_name_or_path"], config.get("peft_type")
        known = hashlib.sha256(b"".join(file.read_bytes() for file in files) + str(base).encode()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"model_name_or_path={name!r} can't be read as adapters ({type(error).__name__}: {error}); give a folder "
            "that peft's save_pretrained wrote"
        ) from error
    if not isinstance(base, str) or kind != "LORA" or config.get("megatron_config") is not None:
        raise UsageError(
            f"model_name_or_path={name!r} has adapters of kind {kind!r} for base_model_name_or_path={base!r}; LoRA "
            "adapters that name their base are read"
        )
    notice(
        f"model_name_or_path={name}: its LoRA adapters are merged into {base}, in float32; all weights of the result "
        "are trained, or under lora new adapters"
    )
    from huggingface_hub.constants import HF_HOME

    folder = Path(HF_HOME) / "adapters" / f"{Path(name).resolve().name}-{known[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            made = Path(place, "made")
            _merge(name, base, str(config.get("task_type")), made)
            if not folder.is_dir():  # another process may have been faster
                os.replace(made, folder)
    return str(folder)


def _merge(name: str, base: str, task_type: str, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    scores = task_type == "SEQ_CLS"
    head: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    labels = {"num_labels": 1} if scores else {}
    try:
        network = head.from_pretrained(base, dtype=torch.float32, trust_remote_code=False, **labels)
        model: Any = PeftModel.from_pretrained(network, name)
        model.merge_and_unload().save_pretrained(folder)
        has_tokenizer = Path(name, "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(name if has_tokenizer else base, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"model_name_or_path={name!r}: its adapters can't be merged into their base {base!r} ({reason}); give "
            "base_model_name_or_path in its adapter_config.json a directory or hub name that is reachable"
        ) from error
    tokenizer.save_pretrained(folder)


def export_adapters(model: Any, base: str | None, folder: Path) -> None:
    """Writes the adapters of a model in peft's form, for ``base``, a directory or hub name."""
    if not hasattr(model, "merge_and_unload"):
        raise UsageError("--adapters: the checkpoint's run trained all weights, without lora; export the model")
    if base is None:
        raise UsageError(
            "--adapters: the checkpoint's run began with new weights, which no model_name_or_path names, so that the "
            "adapters have no base; export the merged model"
        )
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    model.save_pretrained(folder)
