import ast
import asyncio
import math
import random
import sys
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest

from datamodules.language.calculator import calculator
from datamodules.language.calls import Call
from datamodules.language.dialogues import transcript
from datamodules.language.message_reader import message_of
from datamodules.language.search import Search, islands, search
from datamodules.language.tools import ToolEnvironment, Tools, schema_of
from rl_modules.common.errors import UsageError


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


def weather(city: str, days: int = 1, unit: Literal["c", "f"] = "c", at: list[float] | None = None) -> str:
    """Tells the weather.

    Args:
        city: Where.
        days: How many.
        unit: Of the temperature.
        at: Hours.
    """
    return f"{city} {days} {unit} {at}"


def days(of: dict[str, list[int]], either: int | str) -> str:
    """Tells days.

    Args:
        of: Days of months.
        either: A day, or its name.
    """
    return f"{of} {either}"


def half() -> str:
    """Writes half a surrogate pair."""
    return "a\ud83d"


async def slowly(x: float) -> dict[str, Any]:
    """Doubles.

    Args:
        x: A number.
    """
    return {"twice": 2 * x}


def broken(x: int) -> str:
    """Fails.

    Args:
        x: A number.
    """
    raise RuntimeError(f"no {x}")


def test_a_tool_is_what_transformers_makes_of_it():
    from transformers.utils import get_json_schema

    assert schema_of(weather) == get_json_schema(weather)
    assert ToolEnvironment([weather]).tools == [get_json_schema(weather)]


@pytest.mark.parametrize(("call", "result"), [
    (Call("weather", {"city": "Bern"}), "Bern 1 c None"),
    (Call("weather", {"city": "Bern", "days": 2, "unit": "f", "at": [1, 2.5]}), "Bern 2 f [1, 2.5]"),
    (Call("weather", {"city": "Bern", "at": None}), "Bern 1 c None"),
    (Call("weather", {"city": "Bern", "days": 2.0, "at": [1.0]}), "Bern 2 c [1.0]"),  # JSON has one kind of number
    (Call("days", {"of": {"May": [1.0, 2]}, "either": 3.0}), "{'May': [1, 2]} 3"),
    (Call("days", {"of": {}, "either": "3.0"}), "{} 3.0"),
    (Call("half", {}), "a\ufffd"),
    (Call("slowly", {"x": 3}), '{"twice": 6}'),
])  # fmt: skip
def test_a_right_call_returns_the_function_s_result(call, result):
    assert Tools([weather, slowly, days, half]).run(call) == result


@pytest.mark.parametrize(("call", "says"), [
    (Call("wether", {"city": "Bern"}), "did you mean weather"),
    (Call("weather", {}), "needs city"),
    (Call("weather", {"city": 3}), "does not fit"),
    (Call("weather", {"city": "Bern", "days": "2"}), "does not fit"),
    (Call("weather", {"city": "Bern", "days": True}), "does not fit"),
    (Call("weather", {"city": "Bern", "days": 2.5}), "does not fit"),
    (Call("weather", {"city": "Bern", "days": 1e999}), "does not fit"),
    (Call("weather", {"city": "Bern", "unit": "k"}), "does not fit"),
    (Call("weather", {"city": "Bern", "at": ["noon"]}), "does not fit"),
    (Call("weather", {"city": None}), "does not fit"),
    (Call("weather", {"city": "Bern", "self": 1}), "no argument 'self'"),
    (Call("broken", {"x": 3}), "RuntimeError: no 3"),
    (Call("__import__", {"name": "os"}), "there is no tool"),
    (Call("", {}, "it is no JSON"), "it is no JSON"),
])  # fmt: skip
def test_a_wrong_call_is_an_observation(call, says):
    result = Tools([weather, broken]).run(call)
    assert result.startswith("error: ") and says in result


def leaves(x: int) -> str:
    """Ends the program, as argparse does.

    Args:
        x: A number.
    """
    sys.exit(x)


async def closes() -> str:
    """Ends its coroutine."""
    raise GeneratorExit


async def cancels() -> str:
    """Ends its coroutine."""
    raise asyncio.CancelledError


@pytest.mark.parametrize(("call", "result"), [
    (Call("leaves", {"x": 2}), "error: SystemExit: 2"), (Call("closes", {}), "error: GeneratorExit: "),
    (Call("cancels", {}), "error: CancelledError: "),
])  # fmt: skip
def test_a_tool_that_ends_the_program_is_an_observation(call, result):
    assert Tools([leaves, closes, cancels]).run(call) == result


def test_async_tools_share_a_loop_so_that_a_client_lives_from_call_to_call():
    client: dict[str, Any] = {}

    async def ask() -> int:
        """Asks a client that belongs to the loop of the first call."""
        client.setdefault("answers", asyncio.Queue()).put_nowait(1)
        client.setdefault("reader", asyncio.ensure_future(asyncio.sleep(3600)))
        assert client["reader"].get_loop() is asyncio.get_running_loop() and not client["reader"].done()
        return client["answers"].qsize()

    tools = Tools([ask])
    assert [tools.run(Call("ask", {})) for _ in range(9)] == [str(n) for n in range(1, 10)]


@pytest.mark.parametrize("one", [calculator, "datamodules.language.calculator:calculator"])
def test_one_tool_needs_no_list(one):
    assert ToolEnvironment(one).tools == [schema_of(calculator)]


def test_a_long_result_is_cut_off():
    def much() -> str:
        """Writes much."""
        return "x" * 1000

    assert Tools([much], result_limit=10).run(Call("much", {})) == "x" * 10 + " [990 characters cut off]"


def test_functions_that_a_model_can_t_be_told_of_are_refused():
    def untyped(x):
        """Does.

        Args:
            x: A number.
        """

    def undescribed(x: int) -> int:
        """Does."""
        return x

    for function in (untyped, undescribed, lambda x: x):
        with pytest.raises(UsageError, match=r"test_tools.py:\d+"):
            Tools([function])
    with pytest.raises(UsageError, match="two functions of one name"):
        Tools([weather, weather])
    with pytest.raises(UsageError, match="has no 'wether'"):
        Tools([f"{__name__}:wether"])


def test_calls_are_answered_and_a_message_without_calls_ends_the_dialogue():
    environment = ToolEnvironment(["datamodules.language.calculator:calculator"], call_reward=-0.1)
    environment.reset({"prompt": "6*7?", "answer": 42})
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}
    messages, reward, done = environment.step({"role": "assistant", "content": "", "tool_calls": [call, call]})
    assert messages == [{"role": "tool", "name": "calculator", "content": "42"}] * 2
    assert (reward, done) == (-0.2, False)
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    assert environment.step(message_of(text))[0] == messages[:1]
    assert environment.step({"role": "assistant", "content": text}) == ([], 0.0, True)  # text is no call
    assert environment.step({"role": "assistant", "content": " 42 "}) == ([], 1.0, True)
    assert environment.step({"role": "assistant", "content": "43"}) == ([], 0.0, True)


# ---------------------------------------------------------------- calculator


def test_the_calculator_equals_fractions():
    """Compared with expressions whose values are computed while they are made."""
    rng = random.Random(0)

    def expression(depth):
        if depth == 0:
            n = rng.randrange(100)
            return str(n), Fraction(n)
        (left, a), (right, b) = expression(depth - 1), expression(rng.randrange(depth))
        symbol = rng.choice([s for s in ("+", "-", "*", "/", "//", "%") if b or s in "+-*"])
        value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b,
                 "//": lambda: Fraction(a // b), "%": lambda: a % b}[symbol]()  # fmt: skip
        return f"({left} {symbol} {right})", value

    for _ in range(300):
        text, value = expression(rng.randrange(1, 5))
        assert Fraction(calculator(text)) == value


@pytest.mark.parametrize(("expression", "value"), [
    ("0.1 + 0.2", "0.3"), ("1/3", "1/3"), ("10/4", "2.5"), ("-7 // 2", "-4"), ("2**-2", "0.25"),
    ("2**100", "1267650600228229401496703205376"),
    ("-0.05*1", "-0.05"), ("1_000*2", "2000"), (" 7 ", "7"), (".5+1.", "1.5"), ("1/1024", "0.0009765625"),
])  # fmt: skip
def test_the_calculator_is_exact(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", [
    "9**9**9", "2**100000", "1e99999999", "(9**999)*(9**999)*(9**999)*(9**999)", "1/0", "0**-1", "2**0.5", "a",
    "__import__('os')", "(1).real", "[1]", "1 if 1 else 2", "'x'*9", "True", "1j", "0x10", "1,2", "", "1+", "(" * 300,
    "1\x00", "1;2", "~1", "1<2", "x:=1", "1" * 401,
])  # fmt: skip
def test_the_calculator_refuses_everything_but_arithmetic(expression):
    assert Tools([calculator]).run(Call("calculator", {"expression": expression})).startswith("error: ")


def test_the_calculator_uses_no_eval():
    import datamodules.language.calculator as module

    names = {node.id for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__"}


# ---------------------------------------------------------------- search


def test_search_scores_by_bm25():
    """Worked by hand: three passages of 2, 3 and 4 words, mean 3."""
    passages = ["red fox", "red red hen", "one blue hen sings"]
    engine = Search(passages)
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    fox, hen = (2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3))), (2 * 2.2 / (2 + 1.2))
    assert [engine._score({"red"}, count) for count in engine._counts] == pytest.approx([idf * fox, idf * hen, 0])
    assert engine("Red?") == ["red red hen", "red fox"]
    assert engine("cow") == [] and engine("red", 1) == ["red red hen"]


def test_an_island_is_found_by_its_name():
    names = [island["name"] for island in islands()]
    assert len(set(names)) == len(names) == 400
    for island in islands()[::40]:
        assert search(f"How many people live on {island['name']}?").startswith(f"{island['name']}: {island['people']} ")
    assert search("?") == "nothing found"


# ---------------------------------------------------------------- transcripts


def test_a_transcript_shows_calls_thoughts_and_the_end():
    read = message_of('<think>big</think>look <tool_call>{"name": "f", "arguments": {"x": "3*4"}}</tool_call>')
    wrong = message_of("<tool_call>f(3*4)</tool_call>")
    messages = [read, {"role": "tool", "name": "f", "content": "12"}, wrong, {"role": "assistant", "content": None}]
    assert transcript({"messages": messages, "error": None, "ended": "done"}).splitlines() == [
        'assistant: <think>big</think> look f({"x": "3*4"})', "tool: 12", "assistant: unreadable call({})",
        "assistant: ", "[done]",
    ]  # fmt: skip
