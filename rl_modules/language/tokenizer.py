"""Tokenizers: a character tokenizer for models from scratch, any Hugging Face tokenizer, and both as plain data."""

import string
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from rl_modules.common.errors import UsageError

#: Every character that the character tokenizer knows: printable ASCII and the newline.
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
#: Entry of an export's ``tokenizer_config.json`` if ``AutoTokenizer`` would choose a class that splits texts
#: differently.
PLAIN_AUTO_MAP = {"AutoTokenizer": [None, "plain_tokenizer.PlainTokenizer"]}
#: Tokenizer classes that follow their ``tokenizer.json``, by the names in ``tokenizer_config.json``.
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per printable ASCII character, and ``<pad>``, ``<eos>``, ``<unk>``."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are found before texts are split. AutoTokenizer reads an export of a Qwen2 model with that model's
    # own way of splitting, under which spaces and line feeds would be left out.
    tokenizer.add_tokens([AddedToken(space, normalized=False) for space in " \n"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def refuse_no_model(name: str) -> None:
    """Refuses a checkpoint, and a directory of PEFT's adapters, which lack the model that they belong to."""
    if name.endswith(".ckpt") and Path(name).is_file():
        raise UsageError(f"{name!r} is a checkpoint, and a model is a directory; write one with `rl export --ckpt_path "
                         f"{name} --output FOLDER`, and give FOLDER")  # fmt: skip
    config = Path(name, "adapter_config.json")
    if config.is_file():
        scores = '"SEQ_CLS"' in config.read_text(encoding="utf-8")
        load = (f"AutoPeftModelForSequenceClassification.from_pretrained({name!r}, num_labels=1)" if scores else
                f"AutoPeftModelForCausalLM.from_pretrained({name!r})")  # fmt: skip
        raise UsageError(f"{name!r} holds adapters of PEFT without their model; merge them first, {load}."
                         "merge_and_unload().save_pretrained(FOLDER), and give FOLDER; lora={...} trains new ones from "
                         "there")  # fmt: skip


def load_tokenizer(name_or_path: str | None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model directory or hub name; None: the character tokenizer.

    A tokenizer without a pad token pads with its EOS token: lengths decide what is padding here, never ids.
    """
    if name_or_path is None:
        return character_tokenizer()
    try:
        # For some types of models, such as Qwen2, AutoTokenizer takes a class that replaces the file's pre-tokenizer.
        is_plain = get_tokenizer_config(name_or_path).get("tokenizer_class") in _PLAIN
        kind = PreTrainedTokenizerFast if is_plain else AutoTokenizer
        tokenizer = kind.from_pretrained(name_or_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        if name_or_path.count("/") != 1 and "/" in name_or_path and not Path(name_or_path).exists():
            raise UsageError(f"there is no model directory {name_or_path}; if an earlier stage writes it, run that "
                             "first (the config's header says how), else give another with --model.model_name_or_path"
                             ) from error  # fmt: skip
        refuse_no_model(name_or_path)
        if needs_own_code(error):
            raise UsageError(f"tokenizer {name_or_path!r} needs code of its own, and code of a model directory is "
                             "never run; give one that transformers has, for a policy as tokenizer_name_or_path"
                             ) from error  # fmt: skip
        raise UsageError(
            f"tokenizer {name_or_path!r} can't be loaded ({_first_line(error)}); give a directory with a "
            "tokenizer.json, or a hub name that is reachable or cached, as tokenizer_name_or_path"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without its files
        raise UsageError(f"tokenizer {name_or_path!r} has no vocabulary: the model's folder is without a "
                         "tokenizer.json; save the tokenizer there, or give tokenizer_name_or_path")  # fmt: skip
    return prepared(tokenizer, name_or_path)


def prepared(tokenizer: Any, name: str) -> PreTrainedTokenizerBase:
    """Returns a tokenizer that can end completions and pad; one without a pad token pads with its EOS token."""
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


def tokenizer_to_dict(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns the tokenizer's files by name, as text that a checkpoint may hold (bytes as Latin-1 characters)."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes().decode("latin-1") for path in files}


def tokenizer_from_dict(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """The inverse of :func:`tokenizer_to_dict`."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for name, text in files.items():
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise UsageError(f"the checkpoint's tokenizer has a file {name!r}, which lies outside of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("latin-1"))
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:
            if not needs_own_code(error):
                raise
            raise UsageError("the checkpoint's tokenizer needs code of its own, and code in a checkpoint is never run; "
                             "train with tokenizer_name_or_path, one that transformers has") from error  # fmt: skip


def needs_own_code(error: Exception) -> bool:
    """Returns whether transformers' error says that a model or tokenizer needs custom Python code."""
    return "custom code" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def check_same_tokens(argument: str, other: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Refuses a model whose tokens differ from those that the policy writes."""
    theirs, ours = other.get_vocab(), policy.get_vocab()
    if theirs == ours:
        return
    by_id = {i: token for token, i in ours.items()}
    differing = sorted({i for token, i in set(theirs.items()) ^ set(ours.items())})
    theirs_by_id = {i: token for token, i in theirs.items()}
    i = differing[0]
    raise UsageError(
        f"{argument} has a tokenizer with {len(theirs)} tokens in which id {i} is {theirs_by_id.get(i)!r}, in the "
        f"policy's {len(ours)} it is {by_id.get(i)!r}; both must be trained with one tokenizer"
    )
