"""The field guide: its notebooks are its scripts with outputs, its answers are right, its symbols are defined."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rl_modules

LADDER = Path(__file__).parents[2] / "docs/ladder"
NOTEBOOKS = sorted(LADDER.glob("[0-9][0-9]*_*.py"))
SCRIPTS = NOTEBOOKS[:-1]  # the last page draws the others' curves
_EXERCISE = re.compile(r"\*\*Exercise (\w+\.\d+)\.\*\*(.*?)</details>", re.DOTALL)
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def page_of(script):
    """The page's number without a leading zero: 9, or 9b between 9 and 10."""
    return re.sub("^0(?=.)", "", script.stem.partition("_")[0])


#: The pages in order.
PAGES = [page_of(script) for script in SCRIPTS]


def text_of(script):
    """The script's text without comment signs."""
    return "".join(re.sub(r"^# ?", "", line) for line in script.read_text("utf-8").splitlines(keepends=True))


def prose_of(script):
    """The text of its cells of text, without code."""
    cells = re.split(r"(?m)^# %% ?", script.read_text("utf-8"))
    text = "\n".join(re.sub(r"(?m)^# ?", "", cell) for cell in cells if cell.startswith("[markdown]"))
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def exercises():
    for script in SCRIPTS:
        for name, text in _EXERCISE.findall(text_of(script)):
            yield pytest.param(script, text, id=name)


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(LADDER))
    monkeypatch.chdir(LADDER)
    monkeypatch.setenv("LADDER_SHORT", "1")
    monkeypatch.delitem(sys.modules, "helpers", raising=False)


@pytest.mark.parametrize(("script", "text"), list(exercises()))
def test_the_answer_is_right(script, text, tmp_path):
    answer = text.partition("<summary>Answer</summary>")[2]
    [code] = _CODE.findall(answer)
    assert "assert" in code
    (tmp_path / "answer.py").write_text(code, "utf-8")
    runpy.run_path(str(tmp_path / "answer.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_rung_has_three_exercises_in_order(script):
    names = [name for name, _ in _EXERCISE.findall(text_of(script))]
    assert len(names) >= 3 and names == [f"{page_of(script)}.{i + 1}" for i in range(len(names))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_rung_has_its_parts_and_is_no_longer_than_a_sitting(script):
    text = text_of(script)
    for part in ("**Next:**" if script != SCRIPTS[-1] else "**Before:**", "How to read it", "What failure looks like",
                 "**Sources.**"):  # fmt: skip
        assert part in text, part
    prose = re.sub(r"\$\$.*?\$\$", "", prose_of(script), flags=re.DOTALL)
    assert 600 < len(re.sub(r"\$[^$]*\$", "x", prose).split()) < 1500


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda script: script.stem)
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
    page = PAGES.index(page_of(script))
    known = {}
    for row in (LADDER / "glossary.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if len(cells) == 5 and cells[3] in PAGES:
            for name in re.findall(r"\\[A-Za-z]+(?:\{[A-Za-z]+\})?", cells[1]):
                known.setdefault(name, PAGES.index(cells[3]))
    greek = set(
        re.findall(
            r"\\(?:var)?(?:gamma|alpha|epsilon|delta|theta|tau|Psi|phi|lambda|rho|beta|sigma|pi)\b", text_of(script)
        )
    )
    assert sorted(name for name in greek if known.get(name, 99) > page) == []


#: Letters with a second meaning, which the glossary names above its table.
TWICE = {"h", "k", "m", "p", "s", "x", "y", "z", r"\alpha", r"\sigma"}


def test_no_page_uses_a_symbol_before_the_page_that_the_glossary_names():
    rows = re.findall(r"(?m)^\|(.*)\|[^|]*\| (\d+\w?) \|$", (LADDER / "glossary.md").read_text("utf-8"))
    defined = [(name, PAGES.index(page)) for cell, page in rows for name in re.findall(r"\$([^$]+)\$", cell)]
    assert len(defined) > 60
    math = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$", re.DOTALL)
    for number, script in enumerate(SCRIPTS):
        used = " ".join(block or line for block, line in math.findall(re.sub(r"`[^`\n]*`", "", prose_of(script))))
        early = [name for name, page in defined if page > number and name not in TWICE
                 and re.search(rf"(?<![A-Za-z\\_{{]){re.escape(name)}(?![A-Za-z])", used)]  # fmt: skip
        assert early == [], script.stem


def test_the_map_has_every_algorithm_and_page():
    map_of_the_field = (LADDER / "index.md").read_text("utf-8")
    families = map_of_the_field.partition("| algorithm of this project")[2].partition("## The pages")[0]
    assert set(rl_modules.__all__) <= set(re.findall(r"`(\w+)`", families))
    linked = re.findall(r"(?m)^\| \[\w+\. [^\]]*\]\((\w+)\.md\)", map_of_the_field)
    assert linked == [script.stem for script in SCRIPTS]


@pytest.mark.parametrize(
    "script",
    [
        # This page trains eight language models.
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem == "12b_r1" else pytest.mark.long)
        for path in NOTEBOOKS
    ],
)
def test_the_notebook_runs_shortened(script, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", pyplot.close)
    if script.stem >= "10":
        pytest.importorskip("transformers")
    runpy.run_path(str(script), run_name="notebook")


@pytest.mark.skipif(shutil.which("node") is None, reason="node renders the equations")
def test_every_equation_can_be_rendered():
    texts = [*map(prose_of, NOTEBOOKS), (LADDER / "glossary.md").read_text("utf-8")]
    prose = re.sub(r"`[^`\n]*`", "", "\n".join(texts))
    equations = [block or line for block, line in re.findall(r"\$\$(.+?)\$\$|\$([^$]+?)\$", prose, re.DOTALL)]
    assert len(equations) > 500
    program = (
        f"const katex = require({str(LADDER.parent / 'javascripts/katex.min.js')!r});"
        "for (const text of JSON.parse(require('fs').readFileSync(0, 'utf8')))"
        "  katex.renderToString(text, {throwOnError: true, strict: 'error'})"
    )
    subprocess.run(["node", "-e", program], input=json.dumps(equations), text=True, check=True, timeout=60)


@pytest.mark.long
def test_the_enumerated_answers_have_the_probabilities_of_a_plain_forward_pass():
    pytest.importorskip("transformers")
    import helpers as h

    from rl_modules import SFT

    policy = SFT(model_config=h.TINY, max_completion_length=4)
    policy.configure_model()
    found = h.log_probs(policy)
    assert found.shape == (100, 110)
    for prompt, answer in ((0, 7), (34, 10), (99, 109)):
        ids = policy.tokenizer(h.PROMPTS[prompt] + h.ANSWERS[answer] + policy.tokenizer.eos_token, return_tensors="pt")
        tokens = ids.input_ids
        token = policy.model(input_ids=tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])
        assert abs(float(token[0, 3:].sum() - found[prompt, answer])) < 1e-4
