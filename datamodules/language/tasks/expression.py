"""Arithmetic as text, read by recursive descent; nothing is ever executed."""

import re
from fractions import Fraction
from typing import NamedTuple

#: Longer texts are refused, to bound the time for a model's long expressions.
LONGEST = 400
#: Deepest nesting of parentheses and signs; Python's stack allows a few hundred levels.
DEEPEST = 50
_TOKEN = re.compile(r"[ \t]*([0-9]+|[-+*/()])")


class Value(NamedTuple):
    """The value of an expression.

    Attributes:
        value: exact.
        operands: the whole numbers in it, from left to right.
    """

    value: Fraction
    operands: tuple[int, ...]


class ParseError(ValueError):
    """Not an expression, with the reason."""


def evaluate(text: str, operators: str = "+-*/") -> Value:
    """Returns the exact value of an expression of whole numbers, operators, signs and parentheses.

    expression := term (("+" | "-") term)*        term := factor (("*" | "/") factor)*
    factor := number | "(" expression ")" | ("-" | "+") factor

    Args:
        text: at most 400 characters; spaces don't count.
        operators: those that may occur.

    Raises:
        ParseError: it is none, divides by zero, is too long or too deep, or uses another operator.
    """
    if len(text) > LONGEST:
        raise ParseError(f"{len(text)} characters are more than {LONGEST}")
    return _Parser(_tokens(text), operators).whole()


def _tokens(text: str) -> list[str]:
    tokens, position, text = [], 0, text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"{text[position]!r} has no place in an expression")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """One method per rule of the grammar; each reads on from where the last one stopped."""

    def __init__(self, tokens: list[str], operators: str) -> None:
        self.tokens = tokens
        self.operators = operators
        self.position = 0
        self.depth = 0
        self.operands: list[int] = []

    def whole(self) -> Value:
        value = self.expression()
        if self.position < len(self.tokens):
            raise ParseError(f"{self.tokens[self.position]!r} comes after the end")
        return Value(value, tuple(self.operands))

    def expression(self) -> Fraction:
        value = self.term()
        while (operator := self.take("+-")) is not None:
            right = self.term()
            value = value + right if operator == "+" else value - right
        return value

    def term(self) -> Fraction:
        value = self.factor()
        while (operator := self.take("*/")) is not None:
            right = self.factor()
            if operator == "*":
                value *= right
            elif right == 0:
                raise ParseError("division by zero")
            else:
                value /= right
        return value

    def factor(self) -> Fraction:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ParseError(f"nested more than {DEEPEST} deep")
        token = self.next()
        if token == "(":
            value = self.expression()
            if self.next() != ")":
                raise ParseError("a parenthesis stays open")
        elif token == "-":
            self.allow("-")
            value = -self.factor()
        elif token == "+":
            self.allow("+")
            value = self.factor()
        elif token.isdigit():
            self.operands.append(int(token))
            value = Fraction(int(token))
        else:
            raise ParseError(f"{token!r} stands where a number should be")
        self.depth -= 1
        return value

    def take(self, wanted: str) -> str | None:
        """Returns the next token if it is one of these operators."""
        if self.position == len(self.tokens) or self.tokens[self.position] not in wanted:
            return None
        token = self.next()
        self.allow(token)
        return token

    def allow(self, operator: str) -> None:
        if operator not in self.operators:
            raise ParseError(f"{operator!r} is not among {self.operators}")

    def next(self) -> str:
        if self.position == len(self.tokens):
            raise ParseError("it ends too early")
        self.position += 1
        return self.tokens[self.position - 1]
