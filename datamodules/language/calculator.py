"""A calculator as a tool: exact, and without ``eval``."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
#: Longest expression in characters, and most bits of an intermediate result.
_LONGEST, _MOST_BITS = 400, 4096


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly, in whole numbers and fractions.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3 + 4) * 12 / 5.

    Returns:
        The value: a whole number, a finite decimal, or a fraction.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {_LONGEST} are computed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body, expression.strip())
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if value.denominator == 1 or rest != 1 or value.denominator.bit_length() > 64:
        return str(value)
    places = next(n for n in range(65) if 10**n % value.denominator == 0)
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _value(node: ast.AST, text: str) -> Fraction:
    """The value of a parsed expression."""
    if isinstance(node, ast.Constant):
        written = (ast.get_source_segment(text, node) or "").replace("_", "")
        if re.fullmatch(r"\d+\.?\d*|\.\d+", written):  # no exponents: 1e999999999 would fill the memory
            return Fraction(written)  # 0.1 is a tenth, as it is written
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            if right.denominator != 1 or abs(right) * max(_bits(left), 1) > _MOST_BITS:
                raise ValueError("powers have whole exponents, and results of at most 1,200 digits")
            return Fraction(left ** int(right))
        if type(node.op) in _OPERATORS:
            result = Fraction(_OPERATORS[type(node.op)](left, right))
            if _bits(result) > 2 * _MOST_BITS:
                raise ValueError("the result has more than 2,400 digits")
            return result
    raise ValueError(f"{ast.get_source_segment(text, node) or text!r} is no arithmetic of numbers")


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()
