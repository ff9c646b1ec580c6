"""Control tokens in texts of tools and environments, which are read as text.

transformers' ``apply_chat_template`` marks them in the same way, in whole conversations (``sanitize_control_tokens``).
"""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

#: Private-use characters around a control token that is text, from :meth:`ControlTokens.marked` to its encoding.
_BEGIN, _END = "\U000f0000", "\U000f0001"
_MARKED = re.compile(f"{_BEGIN}(.*?){_END}|[{_BEGIN}{_END}]", re.DOTALL)


class ControlTokens:
    """A tokenizer's special tokens, and the added tokens that its chat template writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = str(tokenizer.chat_template or "")
        names = [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if len(token.content) > 1 and not token.content.isspace() and (token.special or token.content in template)
        ]
        self._pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def marked(self, value: Any) -> Any:
        """A copy of messages in which control tokens are marked as text."""
        if isinstance(value, str):
            return self._pattern.sub(rf"{_BEGIN}\g<0>{_END}", re.sub(f"[{_BEGIN}{_END}]", "", value))
        if isinstance(value, dict):
            return {name: self.marked(item) for name, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def pieces(self, text: str) -> list[str]:
        """Pieces of a rendered text to be encoded one by one: no marked control token stands in one of them."""
        pieces, place = [], 0
        for found in _MARKED.finditer(text):
            pieces.append(text[place : found.start()])
            place = found.end()
            if token := found[1]:
                halves = [token[:1], token[1:]]
                pieces += list(token) if self._pattern.search(halves[1]) else halves
        return [*pieces, text[place:]]

    @staticmethod
    def are_marked_in(text: str) -> bool:
        """Whether a text has marks."""
        return _BEGIN in text
