"""Tokenizers: a character tokenizer for models from scratch, any Hugging Face tokenizer, and both as plain data."""

import string
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_modules.common.errors import UsageError

#: Every character that the character tokenizer knows: printable ASCII and the newline.
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
#: Entry of an export's ``tokenizer_config.json`` if ``AutoTokenizer`` would choose a class that splits texts
#: differently.
PLAIN_AUTO_MAP = {"AutoTokenizer": [None, "plain_tokenizer.PlainTokenizer"]}


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


def load_tokenizer(name_or_path: str | None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model directory or hub name; None: the character tokenizer.

    A tokenizer without a pad token pads with its EOS token: lengths decide what is padding here, never ids.
    """
    if name_or_path is None:
        return character_tokenizer()
    from rl_modules.language.pretrained import read_tokenizer

    return prepared(read_tokenizer(name_or_path), name_or_path)


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
            raise UsageError("the checkpoint's tokenizer can't be read, or needs code of its own, which is never run; "
                             "train with tokenizer_name_or_path, one that transformers has") from error  # fmt: skip
