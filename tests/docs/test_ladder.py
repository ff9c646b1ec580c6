"""The field guide: its notebooks are its scripts with outputs, its answers are right, its symbols are defined."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

LADDER = Path(__file__).parents[2] / "docs/ladder"
SCRIPTS = sorted(LADDER.glob("[0-9][0-9]_*.py"))
SCRIPTS = [script for script in SCRIPTS if "**Exercise" in script.read_text("utf-8")]
_EXERCISE = re.compile(r"\*\*Exercise (\d+\.\d+)\.\*\*(.*?)</details>", re.DOTALL)
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def text_of(script):
    """The script's text without comment signs."""
    return "".join(re.sub(r"^# ?", "", line) for line in script.read_text("utf-8").splitlines(keepends=True))


def exercises():
    for script in SCRIPTS:
        for name, text in _EXERCISE.findall(text_of(script)):
            yield pytest.param(script, text, id=name)


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(LADDER))
    monkeypatch.setenv("LADDER_SHORT", "1")
    monkeypatch.delitem(sys.modules, "helpers", raising=False)


@pytest.mark.parametrize(("script", "text"), list(exercises()))
def test_the_answer_is_right(script, text):
    answer = text.partition("<summary>Answer</summary>")[2]
    [code] = _CODE.findall(answer)
    assert "assert" in code
    exec(compile(code, script.name, "exec"), {"__name__": "answer"})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_rung_has_three_exercises_in_order(script):
    names = [name for name, _ in _EXERCISE.findall(text_of(script))]
    assert names == [f"{int(script.stem[:2])}.{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_notebook_is_the_script_with_outputs(script):
    jupytext = pytest.importorskip("jupytext")
    written = json.loads(script.with_suffix(".ipynb").read_text("utf-8"))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in written] == [
        (cell.cell_type, cell.source) for cell in jupytext.read(script).cells
    ]
    outputs = [output for cell in written for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output for output in outputs if output["output_type"] == "error"] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_symbol_is_defined_on_this_page_or_an_earlier_one(script):
    page = int(script.stem[:2])
    known = {}
    for row in (LADDER / "glossary.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if len(cells) == 5 and cells[3].isdigit():
            for name in re.findall(r"\\[A-Za-z]+(?:\{[A-Za-z]+\})?", cells[1]):
                known.setdefault(name, int(cells[3]))
    greek = set(
        re.findall(
            r"\\(?:var)?(?:gamma|alpha|epsilon|delta|theta|tau|Psi|phi|lambda|rho|beta|sigma|pi)\b", text_of(script)
        )
    )
    assert sorted(name for name in greek if known.get(name, 99) > page) == []


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_notebook_runs_shortened(script, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", pyplot.close)
    if int(script.stem[:2]) >= 10:
        pytest.importorskip("transformers")
    runpy.run_path(str(script), run_name="notebook")
