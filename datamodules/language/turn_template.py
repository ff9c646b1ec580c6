"""The tokens that a chat template writes between what a model wrote and where it continues."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from datamodules.language.messages import WrongAnswer
from rl_modules.common.errors import UsageError
from rl_modules.common.notices import notice
from rl_modules.language.text.chat_template import ChatEncoder, common_length
from rl_modules.language.text.encoding import Messages

#: Stands for what a model wrote, of which no tokens are made.
_WRITTEN = "S3ntinel"
_THOUGHT = "<think>\nTh0ught\n</think>\n\n"
_SHOWN = 30
#: Forms of messages whose ends are kept.
_KEPT = 1000


class TurnTemplate:
    """Continues dialogues token by token: the model's tokens stay, and the template's own for turns are added."""

    def __init__(self, encoder: ChatEncoder, stops: Collection[int]) -> None:
        self.encoder, self.stops = encoder, frozenset(stops)
        if encoder.tokenizer.chat_template is None:
            raise UsageError(
                "environment: the tokenizer has no chat template, which writes an environment's messages; "
                "take a tokenizer with one"
            )
        #: Of a message's form: how often its stand-in is rendered, the characters that end its calls, and the token ids
        #: that end its turn.
        self._ends: dict[str, tuple[int, int, list[int]]] = {}
        self._special = frozenset(i for i, token in encoder.tokenizer.added_tokens_decoder.items() if token.special)

    def following(
        self,
        message: Mapping[str, Any],
        last: int | None,
        new: Sequence[Mapping[str, Any]],
        record: Mapping[str, Any],
        closing: str = "",
    ) -> list[int]:
        """Token ids between a message, ended by the token ``last`` (None: cut off), and the turn after ``new``.

        ``closing`` ends a thought within which the message is cut. Control tokens in ``new`` are read as text.
        """
        stand_in = _stand_in(message)
        new = self.encoder.as_text(list(map(dict, new)))
        try:
            return self._following([*self.encoder.messages("?"), stand_in], last, new, record, closing)
        except UsageError:
            if len(stand_in.get("tool_calls", ())) < 2:
                raise
        # Some templates render one call at most. The tokens of the calls are the model's own.
        stand_in["tool_calls"] = stand_in["tool_calls"][-1:]
        return self._following([*self.encoder.messages("?"), stand_in], last, new, record, closing)

    def _following(
        self, before: Messages, last: int | None, new: Messages, record: Mapping[str, Any], closing: str
    ) -> list[int]:
        key = repr((before[-1], record.get("tools"), record.get("chat_template_kwargs")))
        if key not in self._ends:
            if len(self._ends) == _KEPT:  # calls may have names without number
                self._ends.clear()
            places, alone = self._after(before, record)
            # The end of the calls is the model's own; what is left is the end of its turn.
            calls = len(self._closing(alone, record)) if before[-1].get("tool_calls") else 0
            self._ends[key] = places, calls, self.encoder.continued(alone[calls:])
        places, calls, end = self._ends[key]
        _, after = self._after([*before, *new], record, places, add_generation_prompt=True)
        ids = self.encoder.continued(closing + after[calls:])
        if last is None:
            return ids
        if ids[:1] == [last]:
            return ids[1:]
        place = next((i for i, token in enumerate(end) if token in self.stops), None)
        if place is None or ids[:place] != end[:place] or not ids[place:]:
            return ids
        # Another stop token than the template's stands in its place.
        return ids[place + 1 :] if ids[place] in self.stops | self._special else ids

    def check(self, record: Mapping[str, Any]) -> None:
        """Refuses a template that can't continue a dialogue; reports one that renders its beginning otherwise later."""
        asked, answer = self.encoder.messages("Qu3stion"), {"role": "user", "content": "Answ3r"}
        opened = self.encoder._opened(asked, record, False)
        for text in (_WRITTEN, _THOUGHT + _WRITTEN):
            talk = [*asked, {"role": "assistant", "content": text}, answer]
            whole = str(self.encoder._render(talk, record, add_generation_prompt=True))
            start = whole.find(_WRITTEN)
            if start < 0 or whole.find(answer["content"], start) < 0:
                raise UsageError(
                    "environment: the chat template leaves out a turn of a dialogue "
                    f"({whole[-2 * _SHOWN :]!r} ends a second turn); give another template"
                )
            kept = opened + text + whole[start + len(_WRITTEN) :]
            if kept != whole:
                place = common_length(kept, whole)
                notice(
                    "environment: the chat template renders a dialogue's beginning differently when it goes on "
                    f"({kept[place:][:_SHOWN]!r} becomes {whole[place:][:_SHOWN]!r}); a dialogue keeps the tokens "
                    "that the model has read and written"
                )
                return

    def _after(
        self, messages: Messages, record: Mapping[str, Any], places: int | None = None, **how: Any
    ) -> tuple[int, str]:
        """How often the stand-in is rendered, ``places`` where that is known, and what the template writes after it."""
        parts = str(self.encoder._render(messages, record, **how)).split(_WRITTEN)
        places = len(parts) - 1 if places is None else places
        if not 0 < places < len(parts):
            raise WrongAnswer("can't be answered: the chat template leaves out what the model's message says")
        return places, _WRITTEN.join(parts[places:])

    def _closing(self, alone: str, record: Mapping[str, Any]) -> str:
        """The end of a message's calls, at the beginning of what follows the stand-in of their last argument."""
        _, usual = self._after([*self.encoder.messages("?"), {"role": "assistant", "content": _WRITTEN}], record)
        if usual and alone.endswith(usual):
            return alone[: len(alone) - len(usual)]
        stops = map(re.escape, self.encoder.tokenizer.convert_ids_to_tokens(sorted(self.stops)))
        found = re.search("|".join(stops), alone)
        return alone if found is None else alone[: found.start()]


def _stand_in(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the same form as the model's, with nothing that it wrote but the names of tools."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": _WRITTEN}
    calls = []
    for call in message["tool_calls"]:
        name = str(call["function"]["name"])
        function = {"name": name if re.fullmatch(r"[\w.-]+", name) else "unknown", "arguments": {"value": _WRITTEN}}
        calls.append({**{key: call[key] for key in ("type", "id") if key in call}, "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}
