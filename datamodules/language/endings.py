"""Messages about tokens with which completions can't end, and about tokens that reward functions do not receive."""

from collections.abc import Collection

from datamodules.language.encoding import TextEncoder
from datamodules.language.notices import notice


def note_completions(encoder: TextEncoder, source: str, stops: Collection[int], are_scored: bool) -> None:
    """Reports an end of turn that does not end completions, and tags that the texts of completions leave out.

    Args:
        encoder: of the model's tokenizer.
        source: of the records, for the message.
        stops: token ids that end a completion.
        are_scored: whether reward functions read the texts.
    """
    tokenizer = encoder.tokenizer
    if encoder.chats and (end := encoder.unknown_end(stops)) is not None:
        known = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(list(stops))))
        notice(f"{source}: completions end with {known}, and not with {end!r}, with which the chat template ends the "
               "assistant's turns; set eos_token in tokenizer_config.json to it, or add its id to eos_token_id in "
               "generation_config.json")  # fmt: skip
    if are_scored and (tags := encoder.hidden_tags()):
        notice(f"{source}: {', '.join(tags)} are special tokens, which the texts of completions leave out, so that no "
               "reward function sees them; add them as tokens that are not special")  # fmt: skip


def note_demonstrations(encoder: TextEncoder, source: str) -> bool:
    """Reports a chat template that ends answers without the EOS token; returns whether it is one.

    Args:
        encoder: of the model's tokenizer.
        source: of the records, for the message.
    """
    if not encoder.chats or encoder.ends_turns():
        return False
    notice(f"{source}: the chat template ends the assistant's turns without the EOS token "
           f"{encoder.tokenizer.eos_token!r}, so that a model does not learn from them to end its completions with it; "
           "set eos_token in tokenizer_config.json to the template's end of a turn")  # fmt: skip
    return True
