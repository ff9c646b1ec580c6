"""Adding two numbers."""

import random
from collections.abc import Iterator

from datamodules.language.tasks.base import Question, Record, Task
from rl_modules.common.errors import UsageError


class Addition(Task):
    """Two numbers of up to ``n_digits`` digits: ``23+45=`` → ``68``.

    23+45 and 45+23 are always in the same split.

    Args:
        seed: decides which questions are drawn and in which order.
        n_digits: most digits of an operand, at least 1; with 2 there are 10,000 questions.
        think_format: ``<think>3+5=8 2+4=6</think><answer>68</answer>``, digit by digit from the right with the carry.
        template: the prompt, with fields ``a`` and ``b``.
        chat: prompts are user messages.

    Raises:
        UsageError: ``n_digits`` below 1.
    """

    name = "addition"
    default_template = "{a}+{b}="

    def __init__(
        self,
        seed: int = 0,
        n_digits: int = 2,
        think_format: bool = False,
        template: str | None = None,
        chat: bool = False,
    ) -> None:
        super().__init__(seed, think_format, template, chat)
        if n_digits < 1:
            raise UsageError(f"n_digits={n_digits} must be at least 1")
        self.n_digits = n_digits
        self.size = 10 ** (2 * n_digits)

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
