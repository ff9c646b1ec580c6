"""``rl serve``: its options, and a server in a process of its own."""

import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.cli.information import parser_of
from recipes.language import serve
from rl_modules.common.errors import UsageError
from rl_modules.language.sampling.remote import ServerSampler
from tests.rl_modules.language.sampler_cases import settings, tiny_model


def test_options() -> None:
    parser = parser_of("serve")
    assert parser.parse_args(["--engine", "native", "--port=0"]).port == 0
    assert parser.parse_args([]).host == "127.0.0.1"
    assert parser.parse_args(["--max_rows_in_flight=8"]).max_rows_in_flight == 8


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--prot", "1"], "did you mean port"),
        (["--port", "x"], "--port: invalid int value: 'x'"),
        (["--engine=sglang"], "--engine: invalid choice: 'sglang'"),
        (["port"], "unknown option 'port'"),
    ],
)
def test_refused_options(args: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        serve(parser_of("serve").parse_args(args))


@pytest.mark.slow
def test_a_server_process_writes_and_its_restart_gets_the_weights_again(tmp_path: Path, monkeypatch: Any) -> None:
    """The restarted server has another token, which the run reads from the same file."""
    monkeypatch.delenv("RL_SERVE_TOKEN", raising=False)
    token_file = tmp_path / "token"
    command = [sys.executable, "-m", "recipes", "serve", "--engine", "native", f"--token_file={token_file}", "--port"]

    def start(port: int) -> tuple[subprocess.Popen, str]:
        with (tmp_path / "stderr").open("a") as errors:
            process = subprocess.Popen([*command, str(port)], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(rf"serving on (\S+) with native; its token is in {token_file};", line)
        assert found is not None
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert token_file.read_text().strip() not in line
        return process, found[1]

    process, address = start(0)
    try:
        with pytest.raises(UsageError, match="token_file=.* can't be read"):
            ServerSampler([address], "cpu", token_file=str(tmp_path / "none"))
        first = token_file.read_text()
        sampler = ServerSampler([address], "cpu", retries=3, retry_wait_s=0.1, token_file=str(token_file))
        sampler.update_weights(tiny_model(), 5)
        before = sampler.sample([[5, 6, 7]], 4, range(4), settings())
        process.kill()
        process.wait()
        process, _ = start(int(address.rpartition(":")[2]))
        after = sampler.sample([[5, 6, 7]], 4, range(4), settings())
    finally:
        process.kill()
        process.wait()
    assert token_file.read_text() != first
    assert (tmp_path / "stderr").read_text() == ""  # no bar of transformers per update
    assert before.tokens.tolist() == after.tokens.tolist()
    assert after.version is not None and after.version.tolist() == [5] * 4
