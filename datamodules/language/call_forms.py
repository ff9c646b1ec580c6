"""The forms in which models write thoughts and calls of tools, as fields of transformers' response templates.

A field of calls keeps a call's text where :attr:`Form.calls` reads it, so that one wrong call costs no other.
"""

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datamodules.language.calls import DECODER, Call, call_in, call_of, json_call, read_json

Fields = dict[str, dict[str, Any]]
_THINK: dict[str, Any] = {"open": "<think>", "close": "</think>"}


@dataclass(frozen=True)
class Form:
    """How a thought, an answer and calls are written.

    ``thought``: a field of the text that is not the answer. ``answer``: one of the answer, {} where all other
    text is it. ``call``: one of the calls. ``calls``: what reads a call's text. ``end``: the mark without which a call
    is cut off. ``wrong``: a pattern of the mark of a call; what follows it and is no ``call`` is a wrong one.
    ``marks``: around all calls, no part of the answer.
    """

    call: dict[str, Any]
    calls: Callable[[str], list[Call]] = field(default=lambda text: [json_call(text)])
    thought: dict[str, Any] = field(default_factory=lambda: _THINK)
    answer: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    wrong: str = ""
    marks: tuple[str, ...] = ()

    def fields(self, with_calls: bool) -> Fields:
        """The fields of a response template."""
        text = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
        found: Fields = {"content": text}
        if self.thought:
            found["reasoning_content"] = {**text, **self.thought}
        if self.answer:
            found["answer"] = {**text, **self.answer}
        if with_calls:
            found["tool_calls"] = {"content": "text", "repeats": True, **self.call}
            if self.wrong:
                found["wrong"] = {"content": "text", "repeats": True, "open_pattern": self.wrong, "close": self.end}
        return found


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _tagged(opening: str, closing: str, parameter: str) -> dict[str, Any]:
    """A call whose arguments stand in tags; the tool's schema says which are no text."""
    return {
        "open_pattern": opening,
        "close_pattern": closing,
        "content": "xml-inline",
        "content_args": {"tag_pattern": parameter},
        "transform": _NAMED,
    }


def _llama(text: str) -> list[Call]:
    """Objects apart by ``;``."""
    body = re.sub(r"(?:<\|(?:eom_id|eot_id)\|>\s*)+$", "", text).strip()
    calls: list[Call] = []
    end = 0
    while end < len(body):
        try:
            value, end = DECODER.raw_decode(body, end)
        except (ValueError, RecursionError):
            return [*calls, json_call(body[end:])]
        calls.append(call_in(value))
        while end < len(body) and body[end] in "; \n\t":
            end += 1
    return calls


def _mistral(text: str) -> list[Call]:
    """``[{"name": …, "arguments": {…}, "id": …}]``, or since 2025 ``name[CALL_ID]…[ARGS]{…}``."""
    name, named, arguments = text.partition("[ARGS]")
    if named:
        name, _, own_id = name.partition("[CALL_ID]")
        return [call_of(name.strip(), arguments.strip(), own_id.strip())]
    value, error = read_json(text)
    return [Call("", {}, error)] if error else list(map(call_in, value if isinstance(value, list) else [value]))


def _deepseek(text: str) -> list[Call]:
    """V3 and R1: ``function<｜tool▁sep｜>name`` and a block of JSON; V3.1: ``name<｜tool▁sep｜>`` and JSON alone."""
    first, _, second = text.partition("<｜tool▁sep｜>")
    name, fence, block = second.partition("```json")
    return [call_of(*((name.strip(), block.strip().removesuffix("```")) if fence else (first.strip(), second)))]


def _python_calls(text: str) -> list[Call]:
    """``[name(key=value, …), …]`` with Python's literals, or JSON's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            parsed = ast.parse(text.strip(), mode="eval").body
        found = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        return [call_of(ast.unparse(call.func), _keywords(call)) for call in found if isinstance(call, ast.Call)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return [Call("", {}, f"the call {text.strip()[:80]!r} is no list of name(argument=value): {error}")]


_CONSTANTS = {"true": True, "false": False, "null": None}


class _JSONNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _keywords(call: ast.Call) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("each argument needs its name")
    return {str(k.arg): ast.literal_eval(_JSONNames().visit(k.value)) for k in call.keywords}


#: Forms by name. The first one that reads what a chat template writes is the template's.
FORMS: dict[str, Form] = {
    # Hermes, Qwen 2.5 and 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": Form({"open": "<tool_call>", "close_pattern": r"</tool_call>\s*"}),
    # Qwen 3.5, Nemotron 3: <tool_call><function=name><parameter=key>…</parameter></function></tool_call>
    "qwen_xml": Form(
        _tagged(
            r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            r"</tool_call>\s*",
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        ),
        end="</tool_call>",
        wrong="<tool_call>",
    ),
    # GLM 4.5: <tool_call>name <arg_key>key</arg_key> <arg_value>…</arg_value></tool_call>
    "glm": Form(
        _tagged(
            r"<tool_call>(?P<name>[^\s<{]+)",
            r"</tool_call>\s*",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
        end="</tool_call>",
        wrong="<tool_call>",
    ),
    "mistral": Form(
        {"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])"},
        _mistral,
        thought={"open": "[THINK]", "close": "[/THINK]"},
    ),
    # gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>
    "harmony": Form(
        {
            "open_pattern": r"to=functions\.(?P<name>[\w.-]+)[^{}\n]{0,60}?<\|message\|>",
            "close_pattern": r"<\|(?:call|end|return)\|>\s*(?:<\|start\|>assistant)?",
            "transform": _NAMED,
        },
        thought={"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|(?:end|return)\|>"},
        answer={
            "open_pattern": r"<\|channel\|>(?:final|commentary)[^{}\n<=]{0,60}<\|message\|>",
            "close_pattern": r"<\|(?:end|return)\|>",
        },
    ),
    "deepseek": Form(
        {"open": "<｜tool▁call▁begin｜>", "close_pattern": r"<｜tool▁call▁end｜>\s*"},
        _deepseek,
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    # Gemma 4: <|tool_call>call:name{key:<|"|>…<|"|>}<tool_call|>
    "gemma": Form(
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
            "close_pattern": r"<tool_call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": _NAMED,
        },
        thought={"open": "<|channel>thought\n", "close": "<channel|>"},
    ),
    # LFM 2: <|tool_call_start|>[name(key=value)]<|tool_call_end|>
    "lfm": Form({"open": "<|tool_call_start|>", "close_pattern": r"<\|tool_call_end\|>\s*"}, _python_calls),
    # Muse: to=name<|message|><atem:invoke name="name"><atem:parameter name="key">…</atem:parameter></atem:invoke>
    "atem": Form(
        _tagged(
            r'<atem:invoke name="(?P<name>[^"\n]+)">',
            r"</atem:invoke>\s*(?:</atem:function_calls>)?",
            r'<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>',
        ),
        thought={"open": "to=self<|message|>", "close_pattern": r"<\|eo[mt]\|>"},
        answer={"open": "to=user<|message|>", "close_pattern": r"<\|eo[mt]\|>"},
        end="</atem:invoke>",
        wrong=r"<atem:function_calls>(?!\s*<atem:invoke )",
    ),
    # Llama 3: {"name": …, "parameters": {…}} as the whole text, or after <|python_tag|>
    "llama": Form({"open_pattern": r'<\|python_tag\|>|\A\s*(?=\{\s*"(?:name|type)"\s*:)'}, _llama),
}
