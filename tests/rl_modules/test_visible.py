"""Texts of models are shown as they are: in TensorBoard by its renderer, in a terminal without control characters."""

import html
import re
from typing import Any

import pytest
from tensorboard.plugin_util import markdown_to_safe_html

from datamodules.language.rewards import RewardFunctions
from rl_modules.common.errors import UsageError
from rl_modules.loggers import markdown_table

HOSTILE = [
    "![a picture](https://example.com/p.png)", "[a link](https://example.com)", "<https://example.com>",
    "[x][1]\n[1]: /y", "**bold** _word_ `code` ~~gone~~", "a | b |\n|---|---|", "\\[x\\] \\*", "```\nfenced\n```",
    "# heading\n- item\n1. one\n> quote\n\n    code", "<img src=x onerror=alert(1)>", "&lt;b&gt; &#42;", "---",
    "snake_case_name __init__",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_tensorboard_shows_the_text_itself(text: str) -> None:
    heading = text.replace("\n", " ")
    shown = markdown_to_safe_html(markdown_table({"completion_text": [text], heading: [1.0]}))
    assert set(re.findall(r"<(\w+)", shown)) <= {"table", "thead", "tbody", "tr", "th", "td", "br"}
    (cell, _), headings = (re.findall(f"<{tag}>(.*?)</{tag}>", shown, re.DOTALL) for tag in ("td", "th"))
    assert html.unescape(cell.replace("<br>", "\n")).strip() == text.strip()
    assert [html.unescape(name) for name in headings] == ["completion_text", heading]


ESCAPES = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt.exe\r\x00"


def test_a_terminal_gets_no_control_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    def reward(completions: Any, **columns: Any) -> list[float]:
        if ESCAPES in completions:
            raise ValueError(f"no number in {ESCAPES}")
        return [1.0] * len(completions)

    RewardFunctions([reward])([{"prompt": "a"}, {"prompt": "b"}], [ESCAPES, "7"], [[1], [1]])
    sentence = str(UsageError(f"a line\n{ESCAPES} in a file"))
    assert sentence.startswith("a line\n")
    for text in (capsys.readouterr().out, sentence, html.unescape(markdown_table({"c": [ESCAPES]}))):
        assert not set(text) & set("\x1b\x07\x9b\u202e\r\x00")
        assert "\\x1b" in text and "\\u202e" in text
