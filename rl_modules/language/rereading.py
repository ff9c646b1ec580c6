"""Encodes texts for a reward model: in the format of its training preferences, with its own tokenizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import on
from rl_modules.language.architecture import max_length
from rl_modules.language.critics import sequence_scores
from rl_modules.language.scoring import in_parts
from rl_modules.language.text.chat_template import ChatEncoder, encoder_of

if TYPE_CHECKING:
    from rl_modules.language.policy_with_reference import PolicyWithReference


Prompts = Sequence[str | list[dict[str, Any]]]


def reads_in_the_same_form(judge: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> bool:
    """Whether a reward model reads the policy's tokens: ids, ends of texts, and chat template are equal."""
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
    """Encodes prompts and completions as tokens of another model."""
    if tokenizer.chat_template is None and not all(isinstance(prompt, str) for prompt in asked):
        raise UsageError(
            "the policy's prompts are chat messages, but the reward model's tokenizer has no chat "
            "template; give a reward model with one, or set chat_template=false"
        )
    # Imported here, because the modules can be used without the datamodules.

    encoder = encoder_of(tokenizer, chat_template=False)

    def encoded(prompt: str | list[dict[str, Any]], text: str, ended: bool) -> list[int]:
        try:
            if not ended:
                return encoder.unfinished(prompt, text)
            (begin,), ((answer,),) = encoder.answered([prompt], [text], complete=False)
        except UsageError:  # a model may write what a template does not take as an answer
            (begin,), (answer,) = encoder.prompts([prompt]), tokenizer([text], add_special_tokens=False).input_ids
            answer = [*answer, tokenizer.eos_token_id] if ended else answer
        return [*begin, *answer]

    tokens, length = right_padded([encoded(*row) for row in zip(asked, texts, finished, strict=True)])
    if int(length.max()) > longest:
        raise UsageError(
            f"a prompt and its completion have {int(length.max())} of the reward model's tokens, it takes "
            f"{longest}; lower max_completion_length"
        )
    return tokens, length


def with_ended_turns(rollout: dict[str, Any], tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, Any]:
    """A generation whose ended completions have what the chat template writes after the EOS token."""
    is_chat = [int(not isinstance(asked, str)) for asked in rollout["asked"]]
    rest = ChatEncoder(tokenizer, None, {}).after_eos() if any(is_chat) else []
    if not rest:
        return rollout
    total = rollout["prompt_length"] + rollout["length"]
    ended = rollout["finished"] & on(total.device, is_chat).bool() & (total + len(rest) <= longest)
    tokens = torch.nn.functional.pad(rollout["tokens"], (0, len(rest)))
    place = total[:, None] + torch.arange(len(rest), device=tokens.device)
    end = torch.tensor(rest, device=tokens.device).expand(len(tokens), -1)
    tokens = tokens.scatter(1, place, torch.where(ended[:, None], end, tokens.gather(1, place)))
    return {**rollout, "tokens": tokens, "length": rollout["length"] + ended * len(rest)}


def right_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of token ids as one tensor [B, T], and each row's length, [B]."""
    length = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True), length


def scores_of(policy: "PolicyWithReference", rollout: dict[str, Any]) -> Tensor:
    """The score that a policy's reward model gives each completion, minus its offset, [B]."""
    longest = max_length(policy.reward_model.config)
    if policy.reward_tokenizer is None:
        ended = with_ended_turns(rollout, policy.tokenizer, longest)
        scores: Tensor = in_parts(policy.forward_rows, ended, lambda *text: {"score": policy.scores(*text)})["score"]
        return scores
    asked, texts, finished = rollout["asked"], rollout["texts"], rollout["finished"].tolist()
    tokens, length = encode_again(policy.reward_tokenizer, asked, texts, finished, longest)
    scores = torch.zeros(len(length), dtype=torch.float32, device=policy.device)
    for rows in length.argsort(stable=True).split(policy.forward_rows):
        part = tokens[rows, : int(length[rows].max())].to(policy.device)
        scores[rows.to(policy.device)] = sequence_scores(policy.reward_model, part, length[rows].to(policy.device))
    return scores - policy.reward_offset
