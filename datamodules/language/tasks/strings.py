"""Reversing and sorting strings."""

import itertools
import random
import string
from collections.abc import Iterator

from datamodules.language.tasks.base import Question, Record, Task
from rl_modules.common.errors import UsageError


class _Strings(Task):
    """Strings of given letters and lengths."""

    default_template = "{text}>"

    def __init__(
        self,
        seed: int = 0,
        min_length: int = 2,
        max_length: int = 6,
        alphabet: str = string.ascii_lowercase,
        think_format: bool = False,
        template: str | None = None,
        chat: bool = False,
    ) -> None:
        super().__init__(seed, think_format, template, chat)
        if not 1 <= min_length <= max_length:
            raise UsageError(f"min_length={min_length} must lie between 1 and max_length={max_length}")
        if len(set(alphabet)) != len(alphabet) or not alphabet or alphabet.strip() != alphabet:
            raise UsageError(f"alphabet={alphabet!r} must be different characters, none of them a space at either end")
        self.min_length = min_length
        self.max_length = max_length
        self.alphabet = alphabet
        self.size = sum(len(alphabet) ** length for length in self._lengths)

    @property
    def _lengths(self) -> range:
        return range(self.min_length, self.max_length + 1)

    def questions(self) -> Iterator[Question]:
        for length in self._lengths:
            for letters in itertools.product(self.alphabet, repeat=length):
                yield {"text": "".join(letters)}

    def draw(self, rng: random.Random) -> Question:
        # All lengths are equally frequent, although there are many more long strings.
        return {"text": "".join(rng.choices(self.alphabet, k=rng.choice(self._lengths)))}

    def key(self, question: Question) -> str:
        return question["text"]

    def reasoning(self, question: Question, columns: Record) -> str:
        return " ".join(question["text"])


class Reverse(_Strings):
    """Write a string backwards: ``abc>`` → ``cba``.

    Args:
        seed: decides which strings are drawn.
        min_length: of the strings, at least 1.
        max_length: of the strings.
        alphabet: their letters.
        think_format: ``<think>a b c</think><answer>cba</answer>``.
        template: the prompt, with the field ``text``.
        chat: prompts are user messages.

    Raises:
        UsageError: a setting out of its range.
    """

    name = "reverse"

    def solve(self, question: Question, rng: random.Random) -> Record:
        return {"answer": question["text"][::-1]}


class Sort(_Strings):
    """Put a string's letters in order: ``cab>`` → ``abc``. Anagrams are different questions.

    Args:
        seed: decides which strings are drawn.
        min_length: of the strings, at least 1.
        max_length: of the strings.
        alphabet: their letters; the order is that of the character codes.
        think_format: ``<think>c a b</think><answer>abc</answer>``.
        template: the prompt, with the field ``text``.
        chat: prompts are user messages.

    Raises:
        UsageError: a setting out of its range.
    """

    name = "sort"

    def solve(self, question: Question, rng: random.Random) -> Record:
        return {"answer": "".join(sorted(question["text"]))}
