"""Reaching a number with given operands; answers are read by Python's grammar, and nothing is ever executed."""

import ast
import operator
import random
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from datamodules.language.tasks.base import FRUITLESS, Question, Record, Task
from rl_modules.common.errors import UsageError

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.UAdd: "+", ast.USub: "-"}
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
#: Whole numbers, operators, parentheses and spaces, as many as a model may write: more would take Python long.
_EXPRESSION = re.compile(r"[-0-9+*/() \t]{1,400}")
#: Deepest nesting of parentheses and signs.
_DEEPEST = 50


class Value(NamedTuple):
    """The exact value of an expression, and the whole numbers in it from left to right."""

    value: Fraction
    operands: tuple[int, ...]


class ParseError(ValueError):
    """Not an expression, with the reason."""


def evaluate(text: str, operators: str = "+-*/") -> Value:
    """Returns the exact value of an expression of whole numbers, operators, signs and parentheses."""
    text = text.strip(" \t")
    depths = [text[:i].count("(") - text[:i].count(")") for i in range(len(text))]
    if not _EXPRESSION.fullmatch(text) or max(depths) > _DEEPEST or min(depths) < 0:
        raise ParseError(f"{text[:60]!r} is no expression of whole numbers, operators and parentheses")
    operands: list[int] = []

    def value(node: ast.expr, signs: int = 0) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                operands.append(number)
                return Fraction(number)
            case ast.UnaryOp(op, operand) if signs < _DEEPEST:
                sign = _OPERATORS[type(op)]
                if sign == "-":
                    allow(sign)
                found = value(operand, signs + 1)
                return -found if sign == "-" else found
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                one, other = value(left), value(right)
                allow(_OPERATORS[type(op)])
                return _COMPUTE[_OPERATORS[type(op)]](one, other)
        raise ParseError(f"{ast.unparse(node)[:60]!r} has no place in an expression")

    def allow(sign: str) -> None:
        if sign not in operators:
            raise ParseError(f"{sign!r} is not among {operators}")

    try:
        # Python refuses zeros before a number.
        tree = ast.parse(re.sub(r"(?<!\d)0+(?=\d)", "", text), mode="eval")
        return Value(value(tree.body), tuple(operands))
    except ZeroDivisionError as error:
        raise ParseError("division by zero") from error
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ParseError(f"{text[:60]!r} is no expression: {error}") from error


@dataclass(eq=False)
class Countdown(Task):
    """Reach the target with the operands: ``3,8,1>24:`` → ``3*8*1``. Every solvable question is made from a solution.

    An answer is an expression of whole numbers, which is checked exactly, so any solution counts. Questions with the
    same operands and target are in the same split, in whatever order the operands stand. The thoughts go step by step,
    ``<think>3*8=24 24*1=24</think><answer>3*8*1</answer>``. Of ``n_operands`` numbers from 1 to ``max_operand`` every
    one must be used exactly once under ``use_all``, otherwise at most once; targets go from 1 to ``max_target``.
    """

    name = "countdown"
    default_template = "{numbers}>{target}:"
    n_operands: int = 3
    max_operand: int = 10
    max_target: int = 50
    operators: str = "+-*"
    use_all: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("n_operands", 2), ("max_operand", 1), ("max_target", 1)):
            self._require(name, least)
        if not self.operators or set(self.operators) - set(_PRECEDENCE):
            raise UsageError(f"operators={self.operators!r} must be some of +-*/")

    def draw(self, rng: random.Random) -> Question:
        for _ in range(FRUITLESS):
            operands = [rng.randint(1, self.max_operand) for _ in range(self.n_operands)]
            used = self.n_operands if self.use_all else rng.randint(2, self.n_operands)
            value, solution, steps = self._combine(operands[:used], rng)
            if value.denominator == 1 and 1 <= value <= self.max_target:
                rng.shuffle(operands)
                numbers = ",".join(map(str, operands))
                return {"numbers": numbers, "target": int(value), "solution": solution, "steps": steps}
        raise UsageError(
            f"operators={self.operators!r} hardly lead from {self.n_operands} operands up to "
            f"{self.max_operand} to a target from 1 to max_target={self.max_target}; allow more of "
            "them, or a larger target"
        )

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
            sign = rng.choice(self.operators)
            if sign == "/" and (right == 0 or (left / right).denominator != 1):
                return Fraction(-1), "", ""  # draw again
            rank, value = _PRECEDENCE[sign], _COMPUTE[sign](left, right)
            steps.append(f"{_signed(left)}{sign}{_signed(right)}={value}")
            left_text = f"({left_text})" if left_rank < rank else left_text
            # a-(b-c) and a/(b*c) need parentheses, a+(b+c) does not.
            closes = right_rank < rank or (right_rank == rank and sign in "-/")
            parts.append((value, left_text + sign + (f"({right_text})" if closes else right_text), rank))
        return parts[0][0], parts[0][1], " ".join(steps)


def _signed(value: Fraction) -> str:
    return f"({value})" if value < 0 else str(value)
