"""The page that lists the functions of one batch, and the table of what a reader passes."""

import pytest

from benchmarks import reading


@pytest.mark.long
def test_the_page_of_one_batch_lists_the_functions_that_the_profile_finds():
    page = reading.PAGE.read_text("utf-8")
    assert reading.with_block(page) == page, "run `python -m benchmarks.reading page`"
    assert [line for line in page.splitlines() if line.endswith("`):")] == [], "write a sentence for these"


def test_functions_are_named_with_their_classes_and_the_first_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "ROOT", tmp_path)
    lines = ["class A:", "    @property", "    def b(self):", '        """Returns :class:`~c.D`, e.g. ``1``. More.', "",
             '        Rest."""', "", "        def inner():", "            pass", "", "", "def f():",
             '    """Reads', '    two lines."""']  # fmt: skip
    (tmp_path / "module.py").write_text("\n".join(lines))
    assert reading.functions_of("module.py") == {
        2: ("A.b", "Returns `D`, e.g. `1`."), 8: ("A.b.inner", ""), 12: ("f", "Reads two lines."),
    }  # fmt: skip


def test_the_whole_counts_files_lines_refusals_and_state(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "ROOT", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/a.py").write_text("class A:\n    def state_dict(self):\n        raise UsageError('x')\n")
    (tmp_path / "recipes/b.py").write_text("def f():\n    raise ValueError('UsageError')\n" + "\n" * 60)
    (tmp_path / "recipes/c.py").write_text(
        "def f(module):\n    import torch\n    from rl_modules import ppo\n    return module._a + module.b\n"
        "def g(module: PPO):\n    return module._a\nn: Any = setting(1)  # fmt: skip\n"
    )
    assert reading.whole() == {
        "product_files": 3, "product_lines": 72, "small_files": 2, "refusals": 1, "state_functions": 1,
        "imports_in_functions": 1, "on_hosts": 1, "private_of_hosts": 1, "skips": 1, "untyped_settings": 1,
    }  # fmt: skip


def test_imports_lead_to_files_and_back():
    graph = {"a": frozenset("b"), "b": frozenset("cd"), "c": frozenset("b"), "d": frozenset(), "e": frozenset("a")}
    assert reading.reached(["a"], graph) == {*"bcd"}
    assert reading.in_circles(graph) == {*"bc"}


def test_no_file_is_in_a_circle():
    found = reading.arrows()
    assert {"rl_modules.actor_critic", "rl_modules.base"} <= reading.reached(["rl_modules.ppo"], found)
    assert found["rl_modules"] == frozenset()
    assert reading.in_circles(found) == set()
