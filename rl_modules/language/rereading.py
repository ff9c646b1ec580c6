"""Encodes texts for a reward model: in the format of its training preferences, with its own tokenizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError

Prompts = Sequence[str | list[dict[str, Any]]]


def reads_in_the_same_form(judge: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> bool:
    """Returns whether a reward model can read the policy's tokens: ids stand for the same tokens, texts begin and end
    alike, and chat templates, if both have one, format conversations alike.

    Args:
        judge: the reward model's tokenizer.
        policy: the policy's.
    """
    one_has_none = not (judge.chat_template and policy.chat_template)
    return (
        judge.get_vocab() == policy.get_vocab()
        and judge.eos_token_id == policy.eos_token_id
        and judge("a").input_ids == policy("a").input_ids  # with what begins a text
        and (one_has_none or judge.chat_template == policy.chat_template)
    )


def encode_again(
    tokenizer: PreTrainedTokenizerBase,
    asked: Prompts,
    texts: Sequence[str],
    finished: Sequence[bool],
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Encodes prompts and completions as tokens of another model.

    Args:
        tokenizer: that model's.
        asked: B prompts: texts, or the messages that the policy's chat template got.
        texts: B completions.
        finished: whether each completion is finished; others get no EOS token.
        longest: tokens that the model can take.

    Returns:
        Tokens, right-padded, [B, T]; and each row's length, [B].

    Raises:
        UsageError: messages, and no chat template to put them in; a text that is too long.
    """
    if tokenizer.chat_template is None and not all(isinstance(prompt, str) for prompt in asked):
        raise UsageError("the policy's prompts are chat messages, but the reward model's tokenizer has no chat "
                         "template; give a reward model with one, or set chat_template=false")  # fmt: skip
    tokens, length = right_padded(encode_answers(tokenizer, asked, texts, finished, chat_template=False))
    if int(length.max()) > longest:
        raise UsageError(f"a prompt and its completion have {int(length.max())} of the reward model's tokens, it takes "
                         f"{longest}; lower max_completion_length")  # fmt: skip
    return tokens, length


def encode_answers(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    texts: Sequence[str],
    finished: Sequence[bool],
    chat_template: bool | None = None,
) -> list[list[int]]:
    """Token ids of prompts and their answers, as ``PreferenceDataModule`` encodes them.

    Args:
        tokenizer: the reward model's.
        prompts: B texts or lists of chat messages; messages go through the chat template.
        texts: B answers.
        finished: whether each ends with the EOS token.
        chat_template: put prompts that are text into the chat template too; None: where the tokenizer has one.
    """
    # Imported here, because the modules can be used without the datamodules.
    from datamodules.language.encoding import TextEncoder

    encoder = TextEncoder(tokenizer, chat_template)
    answers = zip(texts, finished, encoder.completions(texts), strict=True)
    ends = [ids if end else tokenizer(text, add_special_tokens=False).input_ids for text, end, ids in answers]
    return [[*prompt, *answer] for prompt, answer in zip(encoder.prompts(prompts), ends, strict=True)]


def right_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of token ids as one tensor [B, T], and each row's length, [B]."""
    length = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True), length
