"""The pages that the site generates, and the ladder's notebooks."""

import inspect
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import griffe_docstrings  # noqa: E402
import site_hooks  # noqa: E402


def test_every_config_is_in_the_table_with_what_to_expect():
    page = site_hooks.config_page()
    for path in (ROOT / "configs").glob("*/*.yaml"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{path.parent.name}/{path.name}` |")]
        assert "Expect" not in path.read_text("utf-8") or " — |" not in row.split("|")[3]


def test_errors_are_listed_with_their_values_in_braces(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('raise UsageError(f"gamma={gamma!r} must lie in [0, 1] "\n                 "for this")\n')
    assert site_hooks.errors_of(module) == ["gamma={gamma} must lie in [0, 1] for this"]


def test_roles_are_names_in_code_that_lead_to_their_object():
    text = "As :class:`~rl_modules.base.ControlModule` and :meth:`act` do; ``predict`` and a: `b` stay."
    assert griffe_docstrings.with_references(text) == (
        'As <autoref identifier="rl_modules.base.ControlModule" optional><code>ControlModule</code></autoref> and '
        '<autoref identifier="act" optional><code>act</code></autoref> do; ``predict`` and a: `b` stay.'
    )


def test_declared_arguments_are_in_the_signature_and_the_table_of_their_class():
    import griffe

    from rl_modules import PPO, RecurrentPPO

    extensions = griffe.load_extensions(griffe_docstrings.Docstrings)
    for cls in (PPO, RecurrentPPO):
        loaded = griffe.load(cls.__module__, extensions=extensions, search_paths=[ROOT])[cls.__name__]
        (table,) = [part.value for part in loaded.docstring.parse("google") if part.kind.value == "parameters"]
        assert [row.name for row in table] == list(inspect.signature(cls).parameters)
        assert [parameter.name for parameter in loaded.parameters][1:] == [row.name for row in table]
        row = next(row for row in table if row.name == "clip_range")
        assert (row.annotation, row.default) == ("float | str", "0.2")
        assert "ε, how far the ratio may move" in row.description
        assert "γ per transition. Must lie in [0, 1]." in next(row for row in table if row.name == "gamma").description
        assert "clip_range" not in loaded.members  # an argument is no attribute of the class


def test_every_function_of_the_core_has_its_place():
    from rl_modules import functional as F

    page = site_hooks.functional_page()
    assert [name for name in F.__all__ if f".{name}\n" not in page + "\n"] == []


def test_every_page_and_algorithm_can_be_found():
    import rl_modules

    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in nav] == []
    reference = "".join((ROOT / f"docs/reference/{name}.md").read_text("utf-8") for name in ("algorithms", "language"))
    assert [name for name in rl_modules.__all__ if f".{name}\n" not in reference] == []


def test_links_to_source_files_become_pages():
    assert site_hooks.outside("algorithms/ppo.md", "../../rl_modules/ppo.py") == ROOT / "rl_modules/ppo.py"
    assert site_hooks.outside("algorithms/ppo.md", "../results.md") is None
    assert site_hooks.outside("index.md", "../../elsewhere") is None


def test_every_rung_of_the_ladder_has_its_page_and_pictures():
    for script in (ROOT / "docs/ladder").glob("[0-9]*.py"):
        page = script.with_suffix(".md").read_text("utf-8")
        assert f"{script.stem}_files/" in page
        for cell in script.read_text("utf-8").split("# %%"):
            code = [line for line in cell.splitlines()[1:] if line and "[markdown]" not in cell.splitlines()[0]]
            assert [line for line in code if line not in page] == [], script.name


@pytest.mark.slow
def test_a_rung_is_executed(tmp_path):
    pytest.importorskip("jupytext")
    sys.path.insert(0, str(ROOT / "docs/ladder"))
    import build

    page = build.write(build.execute(ROOT / "docs/ladder/01_dynamic_programming.py"), "rung", tmp_path)
    assert "V of the best policy  [8.1, 9.0, 10.0, 7.29, 0.0, 0.0]" in page.read_text("utf-8")
    assert len(list((tmp_path / "rung_files").glob("*.png"))) == 1
