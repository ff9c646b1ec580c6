"""Exports: directories of Hugging Face with a model and its tokenizer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import is_sharded, remove_dropout, restore_dropout
from rl_modules.language.lora import merged
from rl_modules.language.models import eos_token_ids
from rl_modules.language.pretrained import PLAIN_AUTO_MAP
from rl_modules.language.sharding import whole

#: Texts on which ways of splitting differ: spaces, line feeds, numbers, letters beyond ASCII.
_SAMPLES = ("The sum of 12 + 345?\n\n  It's 1.50%\t= x_1", "déjà vu 你好 🙂")
#: Written beside a tokenizer for those who load it with ``trust_remote_code``.
_CODE = '''from transformers import PreTrainedTokenizerFast


class PlainTokenizer(PreTrainedTokenizerFast):
    """What tokenizer.json says."""
'''


def export_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Writes a Hugging Face directory: safetensors, config, generation config, tokenizer. LoRA is merged in, in
    float32.

    An output layer tied to the embedding is written apart if adapters make the two differ. The config has the dropout
    rates that reinforcement learning sets to 0.
    """
    if is_sharded(model):
        return _export_sharded(model, tokenizer, Path(folder))
    if hasattr(model, "merge_and_unload"):
        model = merged(model, torch.float32)  # 16 bits would lose small changes
    folder = Path(folder)
    _name_eos_token(model, tokenizer)
    with original_dropout(model.config):
        model.save_pretrained(folder)
    export_tokenizer(tokenizer, folder)
    return folder


def _export_sharded(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    if hasattr(model, "merge_and_unload"):
        raise UsageError(
            f"adapters can't be merged into sharded weights for {folder}; write a checkpoint, and then "
            "`rl export --ckpt_path` in one process"
        )
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


def export_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves a tokenizer such that ``AutoTokenizer``, which may take the model type's class, reads texts as it does."""
    tokenizer.save_pretrained(folder)
    if _is_read_alike(tokenizer, folder):
        return
    if (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["auto_map"] = PLAIN_AUTO_MAP
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / "plain_tokenizer.py").write_text(_CODE, encoding="utf-8")
        if _is_read_alike(tokenizer, folder):
            return
    rank_zero_warn(
        f"AutoTokenizer.from_pretrained({str(folder)!r}) splits texts into other tokens than the "
        f"{type(tokenizer).__name__} that the model was trained with; load it with "
        f"PreTrainedTokenizerFast.from_pretrained({str(folder)!r})"
    )


def _is_read_alike(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError):  # one that needs code of its own
        return True
    ids = [tokenizer(text).input_ids for text in _SAMPLES]
    return all(
        theirs(text).input_ids == own and theirs.decode(own) == tokenizer.decode(own)
        for text, own in zip(_SAMPLES, ids, strict=True)
    )


@contextmanager
def original_dropout(config: Any) -> Iterator[None]:
    """Gives a config the model's original rates within the context, as an export writes them."""
    was_removed = restore_dropout(config)
    try:
        yield
    finally:
        if was_removed:
            remove_dropout(config)
