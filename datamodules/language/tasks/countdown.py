"""Reaching a number with given operands."""

import random
from collections import Counter
from fractions import Fraction

from datamodules.language.tasks.base import FRUITLESS, Question, Record, Task
from datamodules.language.tasks.expression import ParseError, evaluate
from rl_modules.common.errors import UsageError

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class Countdown(Task):
    """Reach the target with the operands: ``3,8,1>24:`` → ``3*8*1``. Every solvable question is made from a solution.

    An answer is an expression of whole numbers; it is read by a parser and checked exactly, so any solution counts.
    Questions with the same operands and target are in the same split, in whatever order the operands stand.

    Args:
        seed: decides which questions are drawn.
        n_operands: numbers in a question, at least 2.
        max_operand: the largest of them; the least is 1.
        max_target: the largest target; the least is 1.
        operators: those that may be used, of ``+-*/``.
        use_all: every operand must be used exactly once; otherwise at most once.
        think_format: demonstrations reason step by step, ``<think>3*8=24 24*1=24</think><answer>3*8*1</answer>``.
        template: the prompt, with fields ``numbers`` and ``target``.
        chat: prompts are user messages.

    Raises:
        UsageError: a setting out of its range.
    """

    name = "countdown"
    default_template = "{numbers}>{target}:"

    def __init__(
        self,
        seed: int = 0,
        n_operands: int = 3,
        max_operand: int = 10,
        max_target: int = 50,
        operators: str = "+-*",
        use_all: bool = True,
        think_format: bool = False,
        template: str | None = None,
        chat: bool = False,
    ) -> None:
        super().__init__(seed, think_format, template, chat)
        for setting, value, least in (("n_operands", n_operands, 2), ("max_operand", max_operand, 1),
                                      ("max_target", max_target, 1)):  # fmt: skip
            if value < least:
                raise UsageError(f"{setting}={value} must be at least {least}")
        if not operators or set(operators) - set(_PRECEDENCE):
            raise UsageError(f"operators={operators!r} must be some of +-*/")
        self.n_operands = n_operands
        self.max_operand = max_operand
        self.max_target = max_target
        self.operators = operators
        self.use_all = use_all

    def draw(self, rng: random.Random) -> Question:
        for _ in range(FRUITLESS):
            operands = [rng.randint(1, self.max_operand) for _ in range(self.n_operands)]
            used = self.n_operands if self.use_all else rng.randint(2, self.n_operands)
            value, solution, steps = self._combine(operands[:used], rng)
            if value.denominator == 1 and 1 <= value <= self.max_target:
                rng.shuffle(operands)
                return {
                    "numbers": ",".join(map(str, operands)),
                    "target": int(value),
                    "solution": solution,
                    "steps": steps,
                }
        raise UsageError(f"operators={self.operators!r} hardly lead from {self.n_operands} operands up to "
                         f"{self.max_operand} to a target from 1 to max_target={self.max_target}; allow more of "
                         "them, or a larger target")  # fmt: skip

    def key(self, question: Question) -> str:
        return f"{sorted(map(int, question['numbers'].split(',')))}>{question['target']}"

    def solve(self, question: Question, rng: random.Random) -> Record:
        return {
            "answer": self._name(question["solution"]),
            "completion": question["solution"],
            "numbers": [int(number) for number in question["numbers"].split(",")],
            "target": question["target"],
        }

    def reasoning(self, question: Question, columns: Record) -> str:
        return question["steps"]

    def is_correct(self, answer: str, record: Record) -> bool:
        try:
            value, operands = evaluate(answer, self.operators)
        except ParseError:
            return False
        used: Counter[int] = Counter(operands)
        given: Counter[int] = Counter(record["numbers"])
        return value == record["target"] and (used == given if self.use_all else used <= given)

    def extract(self, completion: str) -> str | None:
        """The value and the operands used, ``24 from 1,3,8``: expressions that agree in both are the same answer."""
        answer = self.final_answer(completion)
        return None if answer is None else self._name(answer)

    def _name(self, expression: str) -> str | None:
        try:
            value, operands = evaluate(expression, self.operators)
        except ParseError:
            return None
        return f"{value} from {','.join(map(str, sorted(operands)))}"

    def _combine(self, operands: list[int], rng: random.Random) -> tuple[Fraction, str, str]:
        """Joins random parts by random operators until one is left; returns its value, its text and the steps."""
        parts = [(Fraction(number), str(number), 3) for number in operands]
        steps = []
        while len(parts) > 1:
            left, left_text, left_rank = parts.pop(rng.randrange(len(parts)))
            right, right_text, right_rank = parts.pop(rng.randrange(len(parts)))
            operator = rng.choice(self.operators)
            if operator == "/" and (right == 0 or (left / right).denominator != 1):
                return Fraction(-1), "", ""  # draw again
            rank = _PRECEDENCE[operator]
            value = {"+": left + right, "-": left - right, "*": left * right}.get(operator, Fraction(0))
            if operator == "/":
                value = left / right
            steps.append(f"{_signed(left)}{operator}{_signed(right)}={value}")
            left_text = f"({left_text})" if left_rank < rank else left_text
            # a-(b-c) and a/(b*c) need parentheses, a+(b+c) does not.
            closes = right_rank < rank or (right_rank == rank and operator in "-/")
            parts.append((value, left_text + operator + (f"({right_text})" if closes else right_text), rank))
        return parts[0][0], parts[0][1], " ".join(steps)


def _signed(value: Fraction) -> str:
    return f"({value})" if value < 0 else str(value)
