"""Messages to the user that are shown whatever log level a recipe sets."""

import logging
from collections.abc import Collection
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rl_modules.common.errors import visible

log = logging.getLogger(__name__)


@rank_zero_only
def notice(text: str) -> None:
    """Logs a warning on rank 0, which ``rl fit`` does not silence as it does Lightning's ``rank_zero_info``."""
    log.warning(visible(text))


def note_completions(encoder: Any, source: str, stops: Collection[int], are_scored: bool) -> None:
    """Reports an end of turn that ends no completion (``stops`` do), and tags that completions' texts leave out."""
    tokenizer = encoder.tokenizer
    if encoder.chats and (end := encoder.unknown_end(stops)) is not None:
        known = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(list(stops))))
        notice(f"{source}: completions end with {known}, and not with {end!r}, with which the chat template ends the "
               "assistant's turns; set eos_token in tokenizer_config.json to it, or add its id to eos_token_id in "
               "generation_config.json")  # fmt: skip
    if are_scored and (tags := encoder.hidden_tags()):
        notice(f"{source}: {', '.join(tags)} are special tokens, which the texts of completions leave out, so that no "
               "reward function sees them; add them as tokens that are not special")  # fmt: skip


def note_demonstrations(encoder: Any, source: str) -> bool:
    """Reports a chat template that ends answers without the EOS token; returns whether it is one."""
    if not encoder.chats or encoder.ends_turns():
        return False
    notice(f"{source}: the chat template ends the assistant's turns without the EOS token "
           f"{encoder.tokenizer.eos_token!r}, so that a model does not learn from them to end its completions with it; "
           "set eos_token in tokenizer_config.json to the template's end of a turn")  # fmt: skip
    return True
