"""Tools: typed Python functions that a model calls, and the environment that answers the calls.

    environment: datamodules.language.tools:ToolEnvironment
    environment_kwargs: {tools: ["datamodules.language.calculator:calculator", "mine.tools:weather"]}

A function's signature and Google-style docstring become its JSON schema (transformers' ``get_json_schema``), which the
chat template shows to the model. A wrong call is an observation: the model reads what was wrong.
"""

import inspect
import json
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datamodules.language.calls import Call, calls_of
from datamodules.language.environments import Step
from datamodules.language.event_loop import awaited
from datamodules.language.messages import Message, valid_text
from datamodules.language.tasks.answers import reference_text
from rl_modules.common.errors import UsageError, did_you_mean, text_of
from rl_modules.common.loading import load_object

#: Characters of a result that a model reads; the rest is cut off.
RESULT_LIMIT = 4000


class Tools:
    """Functions by name, their JSON schemas, and calls of them.

    The functions are typed, plain or ``async``, with a docstring that describes every argument; or import paths
    ``package.module:function``. What is longer than ``result_limit`` characters is cut off.
    """

    def __init__(self, functions: Sequence[str | Callable[..., Any]], result_limit: int = RESULT_LIMIT) -> None:
        given: Any = [functions] if isinstance(functions, str) or callable(functions) else functions
        found = [load_object(f, "tool") if isinstance(f, str) else f for f in given]
        self.functions = {getattr(function, "__name__", str(function)): function for function in found}
        if len(self.functions) < len(found):
            raise UsageError(
                f"tools={[getattr(f, '__name__', f) for f in found]} has two functions of one name, by "
                "which the model calls them; rename one"
            )
        self.schemas = {name: schema_of(function) for name, function in self.functions.items()}
        self.result_limit = result_limit

    def answer(self, message: Message) -> list[Message]:
        """Runs a message's calls; returns a ``tool`` message for each, with its result or an error."""
        return [
            {"role": "tool", "name": call.name or "unknown", "content": self.run(call)} for call in calls_of(message)
        ]

    def run(self, call: Call) -> str:
        """Returns a call's result as text: strings as they are, other values as JSON; or ``error: …``."""
        if wrong := call.error or self._refusal(call):
            return f"error: {wrong}"
        known = self.schemas[call.name]["function"]["parameters"].get("properties", {})
        arguments = {name: _fitted(value, known[name]) for name, value in call.arguments.items()}
        try:
            result = awaited(self.functions[call.name](**arguments))
            text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except (Exception, SystemExit, GeneratorExit, CancelledError) as error:  # a tool's own, for the model to read
            text = f"error: {type(error).__name__}: {text_of(error)}"
        text = valid_text(text)
        cut = len(text) - self.result_limit
        return text if cut <= 0 else f"{text[: self.result_limit]} [{cut} characters cut off]"

    def _refusal(self, call: Call) -> str:
        """Why a call does not fit its tool's schema; "" where it does."""
        if call.name not in self.schemas:
            near = did_you_mean(call.name, self.schemas)
            return f"there is no tool {call.name!r}{near}; the tools are {', '.join(self.schemas)}"
        schema = self.schemas[call.name]["function"]["parameters"]
        known, required = schema.get("properties", {}), schema.get("required", [])
        for name, value in call.arguments.items():
            if name not in known:
                return f"{call.name} has no argument {name!r}; it takes {', '.join(known) or 'none'}"
            if _fitted(value, known[name]) is _MISFIT:
                wanted = json.dumps({k: v for k, v in known[name].items() if k != "description"})
                return f"{name}={json.dumps(value)[:80]} of {call.name} does not fit {wanted}"
        missing = [name for name in required if name not in call.arguments]
        return f"{call.name} needs {', '.join(missing)}" if missing else ""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns a function's JSON schema, as chat templates take it; a UsageError where types or descriptions lack."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        said = " ".join(str(error).split())
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        name = getattr(function, "__name__", function)
        raise UsageError(
            f"tool {name!r}{where} can't be described to a model: {said}; give each argument a type, and "
            "a line 'name: meaning' under Args: in its docstring"
        ) from error


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class _Misfit:
    """What :func:`_fitted` returns of a value that does not fit."""


_MISFIT = _Misfit()


def _fitted(value: Any, schema: Mapping[str, Any]) -> Any:
    """A JSON value as a schema of ``get_json_schema`` has it (type, enum, anyOf, nullable, items), 3.0 as an integer;
    ``_MISFIT`` where it does not fit.
    """
    if value is None and schema.get("nullable"):
        return value
    if "anyOf" in schema:
        found = (_fitted(value, one) for one in schema["anyOf"])
        return next((one for one in found if one is not _MISFIT), _MISFIT)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
        value = int(value)
    is_kind = not kinds or any(
        isinstance(value, _TYPES.get(kind, object)) and isinstance(value, bool) <= (kind == "boolean") for kind in kinds
    )
    if not is_kind or ("enum" in schema and value not in schema["enum"]):
        return _MISFIT
    if isinstance(value, list):
        items = [_fitted(item, schema.get("items", {})) for item in value]
        return _MISFIT if _MISFIT in items else items
    if isinstance(value, dict):
        entries = {name: _fitted(item, schema.get("additionalProperties", {})) for name, item in value.items()}
        return _MISFIT if _MISFIT in entries.values() else entries
    return value


class ToolEnvironment:
    """A question that the model answers with the help of tools: a message with calls is answered by their results, a
    message without calls is the answer and ends the dialogue.

    Args:
        tools: functions or their import paths; see :class:`Tools`.
        result_limit: longest result in characters.
        call_reward: added for each call; negative: calls have a price.
    """

    def __init__(
        self, tools: Sequence[str | Callable[..., Any]], result_limit: int = RESULT_LIMIT, call_reward: float = 0.0
    ) -> None:
        self._tools = Tools(tools, result_limit)
        self.call_reward = call_reward
        self.record: dict[str, Any] = {}

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the functions, for the chat template."""
        return list(self._tools.schemas.values())

    def reset(self, record: dict[str, Any]) -> list[Message]:
        """Begins a dialogue with the record's own prompt."""
        self.record = record
        return []

    def step(self, message: Message) -> Step:
        """Answers calls by their results, and scores a message without calls."""
        results = self._tools.answer(message)
        if results:
            return results, self.call_reward * len(results), False
        return [], float(self.score(self.record, str(message.get("content") or ""))), True

    def score(self, record: dict[str, Any], answer: str) -> float:
        """Returns the reward of a final answer: 1.0 where it equals the record's ``answer``, else 0.0. Without that
        column 0.0, and the reward functions judge. To be overridden.
        """
        reference = record.get("answer")
        return 0.0 if reference is None else float(answer.strip() == reference_text(reference))
