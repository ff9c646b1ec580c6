"""Texts as a reward model with another tokenizer than the policy's reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether every id stands for the same token in both."""
    return one.get_vocab() == other.get_vocab()


def encode_again(
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[str | list[dict[str, Any]]],
    texts: Sequence[str],
    finished: Sequence[bool],
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Prompts and completions as the tokens of another model.

    Args:
        tokenizer: that model's.
        asked: B prompts: texts, or the messages that the policy's chat template got.
        texts: B completions.
        finished: whether each has come to its end; a text without messages then gets the EOS token.
        longest: tokens that the model can take.

    Returns:
        Tokens, right-padded, [B, T]; and each row's length, [B].

    Raises:
        UsageError: messages, and no chat template to put them in; a text that is too long.
    """
    rows = [_row(tokenizer, *one) for one in zip(asked, texts, finished, strict=True)]
    length = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if int(length.max()) > longest:
        raise UsageError(f"a prompt and its completion have {int(length.max())} of the reward model's tokens, it takes "
                         f"{longest}; lower max_completion_length")  # fmt: skip
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True), length


def _row(tokenizer: PreTrainedTokenizerBase, asked: str | list[dict[str, Any]], text: str, finished: bool) -> list[int]:
    if isinstance(asked, str):
        ids = [*tokenizer(asked).input_ids, *tokenizer(text, add_special_tokens=False).input_ids]
        return [*ids, int(tokenizer.eos_token_id)] if finished else ids
    if tokenizer.chat_template is None:
        raise UsageError("the policy's prompts are chat messages, but the reward model's tokenizer has no chat "
                         "template; give a reward model with one, or set chat_template=false")  # fmt: skip
    if asked[-1]["role"] == "assistant":  # a prefill, which the completion continues
        messages = [*asked[:-1], {**asked[-1], "content": asked[-1]["content"] + text}]
    else:
        messages = [*asked, {"role": "assistant", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)
