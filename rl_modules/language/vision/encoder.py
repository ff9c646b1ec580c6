"""Conversations with images as tokens: the processor's text stands in each image's place."""

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_modules.common.errors import UsageError
from rl_modules.language.text.chat_template import ChatEncoder
from rl_modules.language.text.encoding import Messages


class ImageEncoder(ChatEncoder):
    """Turns messages with parts ``{"type": "image"}`` into tokens.

    Args:
        tokenizer: with a chat template.
        placeholder: what the template writes for an image.
        system_prompt: see the datamodules, as of the template's variables.

    A record's ``image_texts`` are the texts that stand for its images, in their order.
    """

    reads_images = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        placeholder: str,
        system_prompt: str | None,
        chat_template_kwargs: dict[str, Any],
    ) -> None:
        super().__init__(tokenizer, system_prompt, chat_template_kwargs)
        self.placeholder = placeholder

    def _render(self, messages: Messages, record: Mapping[str, Any], template: str | None = None, **how: Any) -> Any:
        parts = [{**m, "content": _as_parts(m["content"])} if "content" in m else m for m in messages]
        shown = sum(part["type"] == "image" for m in parts for part in m.get("content", ()))
        texts = record.get("image_texts", ())[:shown]
        rendered = super()._render(parts, record, template, **how)
        if not isinstance(rendered, str):  # tokens, and which of them the template marks
            return self._expanded(rendered, texts)
        pieces = rendered.split(self.placeholder)
        if len(pieces) != shown + 1:
            raise UsageError(
                f"the chat template writes {self.placeholder!r} {len(pieces) - 1} times for {shown} images; give a "
                "template that writes it once for each, and texts without it"
            )
        return "".join(chain(*zip_longest(pieces, texts, fillvalue="")))

    def _expanded(self, rendered: Mapping[str, Any], texts: Sequence[str]) -> dict[str, list[int]]:
        """Tokens and marks with each image's own in the place of its placeholder."""
        placeholder = self.tokenizer.convert_tokens_to_ids(self.placeholder)
        waiting, ids, marks = iter(self._tokens(list(texts), False) if texts else []), list[int](), list[int]()
        for token, mark in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True):
            own = next(waiting) if token == placeholder else [token]
            ids, marks = [*ids, *own], [*marks, *([mark] if token != placeholder else [0] * len(own))]
        return {"input_ids": ids, "assistant_masks": marks}


def _as_parts(content: Any) -> list[dict[str, Any]]:
    """A message's content as parts: some templates of models that take images read no plain text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
