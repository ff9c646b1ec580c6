"""The arithmetic parser against Python's own grammar, and what it must refuse."""

import ast
import operator
import random
from fractions import Fraction

import pytest

from datamodules.language.tasks import make_task
from datamodules.language.tasks.countdown import ParseError, evaluate
from rl_modules.common.errors import UsageError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(text):
    """The value by Python's parser and exact fractions."""

    def walk(node):
        match node:
            case ast.Expression():
                return walk(node.body)
            case ast.Constant():
                return Fraction(node.value)
            case ast.UnaryOp():
                return -walk(node.operand) if isinstance(node.op, ast.USub) else walk(node.operand)
            case ast.BinOp():
                return OPERATORS[type(node.op)](walk(node.left), walk(node.right))

    return walk(ast.parse(text, mode="eval"))


def random_text(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(1, 30))
    left, right = random_text(rng, depth - 1), random_text(rng, depth - 1)
    text = left + rng.choice(["", " "]) + rng.choice("+-*/") + right
    return rng.choice([text, f"({text})", f"-({text})"])


def test_values_are_those_of_pythons_grammar():
    rng = random.Random(0)
    compared = 0
    for _ in range(500):
        text = random_text(rng, 4)
        try:
            expected = by_python(text)
        except ZeroDivisionError:
            with pytest.raises(ParseError, match="zero"):
                evaluate(text)
            continue
        assert evaluate(text).value == expected, text
        compared += 1
    assert compared > 400


def test_operands_are_the_numbers_as_written():
    assert evaluate("(3+12)*3 - 4").operands == (3, 12, 3, 4)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "1+", "*2", "(1", "1)", "1 2", "2**3", "2//1", "1/0", "1/(2-2)", "a+1", "1.5", "1_0", "٣", "1=1", "()",
        "__import__('os')", "(" * 60 + "1" + ")" * 60, "-" * 60 + "1", "1+" * 300 + "1", "2^3", "1\n+1",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ParseError):
        evaluate(text)


def test_operators_that_were_not_given_are_refused():
    assert evaluate("6/2", "+-*/").value == 3
    for text in ("6/2", "6+-2"):
        with pytest.raises(ParseError, match="not among"):
            evaluate(text, "+*")


@pytest.mark.parametrize(
    ("use_all", "expression", "right"),
    [
        (True, "3*8*1", True),
        (True, "3*8", False),
        (False, "3*8", True),
        (True, "8*(3*1)", True),
        (True, "3*8+1-1", False),
        (False, "24", False),
        (True, "3*8*1=24", False),
        (True, "3*8-1", False),
    ],
)
def test_countdown_wants_each_operand_once_and_the_target(use_all, expression, right):
    task = make_task("countdown", use_all=use_all)
    columns = {"numbers": [[1, 3, 8]], "target": [24], "answer": ["24 from 1,3,8"]}
    assert task.accuracy(prompts=None, completions=[expression], **columns) == [float(right)]


def test_countdown_demonstrations_solve_their_questions_step_by_step():
    task = make_task("countdown", n_operands=4, operators="+-*/", think_format=True, max_target=99)
    for record in task.records("train", 200):
        thought, expression = record["completion"].removeprefix("<think>").split("</think><answer>")
        expression = expression.removesuffix("</answer>")
        assert by_python(expression) == record["target"]
        assert sorted(evaluate(expression).operands) == sorted(record["numbers"])
        assert record["prompt"] == f"{','.join(map(str, record['numbers']))}>{record['target']}:"
        steps = [step.split("=") for step in thought.split(" ")]
        assert len(steps) == 3 and all(by_python(left) == Fraction(right) for left, right in steps)
        assert steps[-1][1] == str(record["target"])


def test_countdown_questions_in_another_order_are_in_the_same_split():
    task = make_task("countdown", n_operands=3, max_operand=5)
    held_out = {(tuple(sorted(r["numbers"])), r["target"]) for r in task.records("test", 40)}
    trained = {(tuple(sorted(r["numbers"])), r["target"]) for r in task.records("train", 400)}
    assert not held_out & trained


def test_expressions_with_one_value_and_the_same_operands_vote_together():
    task = make_task("countdown")
    assert task.extract("3*8*1") == task.extract("1*(8*3)") == "24 from 1,3,8"
    assert task.extract("4*6") != task.extract("3*8")
    assert task.extract("nonsense") is None


@pytest.mark.long
def test_settings_without_any_question_are_refused_instead_of_drawn_for_ever():
    for settings in ({"operators": "-", "max_operand": 1, "n_operands": 2}, {"operators": "+", "max_target": 2}):
        with pytest.raises(UsageError, match=r"hardly lead from [23] operands"):
            make_task("countdown", **settings).records("train", 1)
