"""The pages that the site generates."""

import inspect
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import griffe_docstrings  # noqa: E402
import site_hooks  # noqa: E402

from tests import built_site  # noqa: E402


class Page:
    """A page as MkDocs passes it to the hooks."""

    def __init__(self, folder: str) -> None:
        self.file = self
        self.src_uri = f"{folder}algorithms.md"


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


def test_a_notebook_becomes_a_page_with_its_pictures(tmp_path):
    import json

    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "\n", "[next](two.ipynb)"]},
        {"cell_type": "code", "source": "1 + 1", "outputs": [
            {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
            {"output_type": "stream", "text": ["three\n"]},
            {"output_type": "display_data", "data": {"image/png": "aGVsbG8=", "text/plain": ["<Figure>"]}},
        ]},
    ]  # fmt: skip
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}))
    page, pictures = site_hooks.notebook_page(tmp_path / "one.ipynb")
    assert pictures == {"one_1.png": b"hello"}
    assert page.startswith(
        "# A title\n\n[next](two.md)\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n```text\nthree\n```"
    )
    assert page.endswith("![A title: plot 1](one_1.png)\n\n[This page as a notebook](one.ipynb)\n")


def test_a_page_has_the_scripts_that_it_needs():
    class Page:
        url = "a/b/"

    def scripts(body):
        return re.findall(r'src="(.*?)"', site_hooks.on_post_page(f"<head></head>{body}", Page))

    assert scripts("text") == []
    assert scripts('<span class="arithmatex">') == ["../../javascripts/katex.min.js", "../../javascripts/equations.js"]
    assert scripts('<pre class="mermaid">') == ["../../javascripts/mermaid.min.js"]
    for names in site_hooks.SCRIPTS.values():
        assert all((ROOT / "docs/javascripts" / name).is_file() for name in names)


def test_the_site_s_own_files_load_nothing_from_elsewhere():
    assert "font: false" in (ROOT / "mkdocs.yml").read_text("utf-8")
    for style in (ROOT / "docs/stylesheets").rglob("*.css"):
        for link in re.findall(r"""url\(["']?(.*?)["']?\)""", style.read_text("utf-8")):
            assert link.startswith("data:") or (style.parent / link).is_file(), f"{style}: {link}"
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.findall(r"(?:extra_css|extra_javascript):\s+- https?:", nav) == []


def test_each_class_of_the_reference_has_a_page():
    pages = site_hooks.class_pages()
    page = pages["reference/algorithms/PPO.md"]
    assert page.startswith("# PPO\n\n::: rl_modules.ppo.PPO\n") and "show_root_heading: false" in page
    inside = site_hooks.with_classes([{"Algorithms": "reference/algorithms.md"}])[0]["Algorithms"]
    assert inside[0] == "reference/algorithms.md" and {"PPO": "reference/algorithms/PPO.md"} in inside
    listed = site_hooks.on_page_markdown((ROOT / "docs/reference/algorithms.md").read_text("utf-8"), Page("reference/"))
    assert ":::" not in listed and "[`PPO`](algorithms/PPO.md): Proximal policy optimization" in listed
    objects = sum(
        len(site_hooks.OBJECT.findall((ROOT / "docs" / page).read_text("utf-8"))) for page in site_hooks.SPLIT
    )
    assert len(pages) == objects  # no two of one name


def test_the_migration_pages_are_short_and_early_stopping_is_found():
    pages = {name: (ROOT / f"docs/how_to/{name}.md").read_text("utf-8") for name in ("from_sb3", "from_trl")}
    assert all(len(text.split()) < 1500 for text in pages.values())
    assert "early stopping" in pages["from_sb3"]


def test_what_a_built_page_fetches_from_other_hosts_is_found(tmp_path):
    page = '<a href="https://arxiv.org"></a><img src="a.png"><link rel="stylesheet" href="https://x.example/a.css">'
    (tmp_path / "index.html").write_text(f'{page}<span class="arithmatex">\\(x\\)</span><script src=//x.example/a.js>')
    assert built_site.findings(tmp_path) == [
        "index.html: fetches https://x.example/a.css",
        "index.html: fetches //x.example/a.js",
        "index.html: has equations and no KaTeX",
    ]
