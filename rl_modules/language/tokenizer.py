"""Tokenizers: a character tokenizer for models from scratch, any Hugging Face tokenizer, and both as plain data."""

import string
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_modules.common.errors import UsageError
from rl_modules.language.pretrained import prepared, read_tokenizer

#: Every character that the character tokenizer knows: printable ASCII and the newline.
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"


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
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name_or_path: str | None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model directory or hub name; None: the character tokenizer.

    A tokenizer without a pad token pads with its EOS token: lengths decide what is padding here, never ids.
    """
    if name_or_path is None:
        return character_tokenizer()

    return prepared(read_tokenizer(name_or_path), name_or_path)


def tokenizer_to_dict(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns the tokenizer's files by name, as text that a checkpoint may hold (bytes as Latin-1 characters)."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes().decode("latin-1") for path in files}


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
