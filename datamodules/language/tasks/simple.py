"""Adding two numbers; reversing and sorting strings."""

import itertools
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

from datamodules.language.tasks.base import Question, Record, Task
from rl_modules.common.errors import UsageError


@dataclass(eq=False)
class Addition(Task):
    """Two numbers of up to ``n_digits`` digits: ``23+45=`` → ``68``. With 2 digits there are 10,000 questions.

    23+45 and 45+23 are always in the same split. The thoughts add digit by digit from the right with the carry,
    ``<think>3+5=8 2+4=6</think><answer>68</answer>``.
    """

    name = "addition"
    default_template = "{a}+{b}="
    n_digits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("n_digits", 1)
        self.size = 10 ** (2 * self.n_digits)

    def questions(self) -> Iterator[Question]:
        bound = 10**self.n_digits
        return ({"a": a, "b": b} for a in range(bound) for b in range(bound))

    def draw(self, rng: random.Random) -> Question:
        bound = 10**self.n_digits
        return {"a": rng.randrange(bound), "b": rng.randrange(bound)}

    def key(self, question: Question) -> str:
        low, high = sorted((question["a"], question["b"]))
        return f"{low}+{high}"

    def solve(self, question: Question, rng: random.Random) -> Record:
        return {"answer": str(question["a"] + question["b"])}

    def reasoning(self, question: Question, columns: Record) -> str:
        steps, carry = [], 0
        a, b = question["a"], question["b"]
        while True:
            total = a % 10 + b % 10 + carry
            steps.append(f"{a % 10}+{b % 10}" + ("+1" if carry else "") + f"={total}")
            a, b, carry = a // 10, b // 10, total // 10
            if a == b == 0:
                return " ".join(steps)


@dataclass(eq=False)
class _Strings(Task):
    """Strings of ``min_length`` to ``max_length`` letters of an alphabet; the thoughts spell them."""

    default_template = "{text}>"
    min_length: int = 2
    max_length: int = 6
    alphabet: str = string.ascii_lowercase

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("min_length", 1, self.max_length)
        alphabet = self.alphabet
        if len(set(alphabet)) != len(alphabet) or not alphabet or alphabet.strip() != alphabet:
            raise UsageError(f"alphabet={alphabet!r} must be different characters, none of them a space at either end")
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
    """Write a string backwards: ``abc>`` → ``cba``."""

    name = "reverse"

    def solve(self, question: Question, rng: random.Random) -> Record:
        return {"answer": question["text"][::-1]}


class Sort(_Strings):
    """Put a string's letters in the order of their codes: ``cab>`` → ``abc``. Anagrams are different questions."""

    name = "sort"

    def solve(self, question: Question, rng: random.Random) -> Record:
        return {"answer": "".join(sorted(question["text"]))}
