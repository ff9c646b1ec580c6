"""What type checkers, and with them editors, know of a call: `tests/typed/calls.py` says which lines are wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import datamodules
import rl_modules

CALLS = Path(__file__).parent / "typed" / "calls.py"
LINES = CALLS.read_text().splitlines()
WRONG = {number for number, line in enumerate(LINES, 1) if line.endswith("# refused")}


def of_pyright() -> set[int]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(CALLS)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=CALLS.parents[2]).stdout)
    return {
        entry["range"]["start"]["line"] + 1 for entry in found["generalDiagnostics"] if entry["severity"] == "error"
    }


def of_mypy() -> set[int]:
    command = [sys.executable, "-m", "mypy", str(CALLS)]
    text = subprocess.run(command, capture_output=True, text=True, cwd=CALLS.parents[2]).stdout
    assert "Found" in text, text
    return {int(number) for number in re.findall(r"typed/calls\.py:(\d+): error", text)}


@pytest.mark.long
@pytest.mark.parametrize("checker", [of_pyright, of_mypy])
def test_the_wrong_calls_are_refused_and_no_other(checker) -> None:
    assert len(WRONG) == 20
    assert checker() == WRONG


def test_every_public_class_is_called() -> None:
    right = "\n".join(line for line in LINES if not line.endswith("# refused"))
    classes = [name for name in [*rl_modules.__all__, *datamodules.__all__] if name[0].isupper()]
    assert [name for name in classes if f"\n{name}(" not in right] == []
