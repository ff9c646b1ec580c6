"""A chat template is tried in a child process, with limits of time and memory, before this process renders with it.

A template is a program of whoever made the tokenizer, and ``{{ 9**(9**9) }}`` can't be interrupted once it runs. This
file is also the child's program, which imports jinja2 alone: 0.1 to 0.2 s, once per template and process.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

#: Processor time and memory that a template may take for all of ``SAMPLES``; usual ones take some milliseconds.
LIMIT_S, LIMIT_MB = 2, 512
#: Longest trial by the clock, for a machine that is busy.
_WAIT_S = 60.0
#: Exit status of a child without enough memory.
_FULL = 3

_ASKED = {"role": "user", "content": "How warm is it?"}
_SAID = {"role": "assistant", "content": "It is warm."}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
    },
}
#: Conversations, and their tools.
SAMPLES: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([_ASKED], None),
    ([{"role": "system", "content": "Be brief."}, _ASKED, _SAID, _ASKED], None),
    ([_ASKED, {**_SAID, "content": "word " * 400}] * 6, None),
    (
        [
            _ASKED,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "20"},
            _SAID,
        ],
        [_TOOL],
    ),
]


#: Templates that were tried.
_BOUNDED: dict[str, bool] = {}


def is_bounded(template: str, variables: Mapping[str, Any]) -> bool:
    """Whether a template ends within the limits, whatever it writes or raises; each is tried once.

    Args:
        template: Jinja's text.
        variables: what it reads beside messages and tools; those of the first call count.
    """
    if template not in _BOUNDED:
        _BOUNDED[template] = _ends(template, variables)
    return _BOUNDED[template]


def _ends(template: str, variables: Mapping[str, Any]) -> bool:
    plain = {name: value for name, value in variables.items() if isinstance(value, str | bool | int | float)}
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            input=json.dumps({"template": template, "variables": plain, "path": sys.path}).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return child.returncode >= 0 and child.returncode != _FULL


def _limit() -> None:
    """Limits this process; Windows has the limit by the clock alone."""
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        with contextlib.suppress(ValueError, OSError):  # macOS refuses this one
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_MB * 2**20, LIMIT_MB * 2**20))


def _render(template: str, variables: Mapping[str, Any]) -> None:
    """Renders the samples as transformers does."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2 reads it of the class)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "28 Nov 2026"}
    compiled = environment.from_string(template)
    for (messages, tools), opens in itertools.product(SAMPLES, (True, False)):
        how = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": opens}
        try:
            compiled.render({**variables, **how})
        except MemoryError:
            raise
        except Exception:  # of a conversation that it does not take
            continue


def _main() -> None:
    given = json.load(sys.stdin)
    sys.path[:] = given["path"]
    _limit()
    try:
        _render(given["template"], given["variables"])
    except MemoryError:
        sys.exit(_FULL)
    except Exception:  # of a text that is no template, which the parent says when it renders
        sys.exit(0)


if __name__ == "__main__":
    _main()
