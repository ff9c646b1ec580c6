"""``rl serve``: its options, and the server of vLLM that it becomes."""

import importlib.util
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from recipes.cli.information import parser_of
from recipes.language import serve
from rl_modules.common.errors import UsageError
from rl_modules.language.server_token import FILE_VARIABLE, SAYS_VARIABLE, TOKEN_VARIABLE


def test_options() -> None:
    parser = parser_of("serve")
    assert parser.parse_args(["--port=0"]).port == 0
    assert parser.parse_args([]).host == "127.0.0.1"
    assert parser.parse_args(["--max_rows_in_flight=8"]).max_rows_in_flight == 8
    assert parser.parse_args(["--model=m", "--", "--seed", "1"]).vllm == ["--seed", "1"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--prot", "1"], "did you mean port"),
        (["--port", "x"], "--port: invalid int value: 'x'"),
        (["--engine=sglang"], "--engine: invalid choice: 'sglang'"),
        (["--model=m", "port"], "unknown option 'port'; options of `vllm serve` stand after --"),
        ([], "give --model the run's model.model_name_or_path, or a folder of `rl export`"),
        (["--engine=native", "--model=m"], "Without vLLM take --model.sampler native, which needs no server"),
        (["--model=m", "--host=256.1.1.1"], "--host=256.1.1.1 --port=8000: OSError: "),
        (["--model=m", "--port=0", "--token_file=/dev/null/token"], "token_file='/dev/null/token' can't be written"),
    ],
)
def test_refused_options(args: list[str], sentence: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        serve(parser_of("serve").parse_args(args))


def test_without_vllm_it_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="rl serve needs a package that is not installed: pip install vllm"):
        serve(parser_of("serve").parse_args(["--model=m"]))


def test_it_becomes_a_server_with_a_token_behind_the_gate(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    token_file = tmp_path / "token"
    words = ["--model=m", "--port=0", f"--token_file={token_file}", "--max_rows_in_flight=8", "--", "--seed", "1"]
    serve(parser_of("serve").parse_args(words))
    _, command, environment = became[0]
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert environment[TOKEN_VARIABLE] == token_file.read_text().strip()
    assert not any(environment[TOKEN_VARIABLE] in word for word in [*command, environment[SAYS_VARIABLE]])
    assert Path(environment[FILE_VARIABLE]).parent.is_dir()
    asked = ["--model=m", "--max-num-seqs=8", "--middleware=rl_modules.language.serving.Gate", "--dtype=float32"]
    assert set(asked) <= set(command) and command[-2:] == ["--seed", "1"]
    assert not any("trust" in word for word in command)
