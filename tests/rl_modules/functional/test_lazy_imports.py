"""The package imports a file when one of its functions is first used, and no earlier."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rl_modules import functional as F


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.long
def test_only_the_files_of_the_used_functions_are_imported():
    loaded = run(
        "import sys; from rl_modules import functional as F; F.gae; "
        "print(*sorted(m for m in sys.modules if m.startswith('rl_modules.functional.')))"
    ).split()
    assert loaded == ["rl_modules.functional.advantages", "rl_modules.functional.checks"]


@pytest.mark.long
def test_a_used_name_becomes_an_ordinary_attribute():
    code = "from rl_modules import functional as F; before = 'gae' in vars(F); print(before, F.gae is vars(F)['gae'])"
    assert run(code) == "False True\n"


@pytest.mark.slow
def test_a_first_use_inside_a_compiled_graph_does_not_break_it():
    code = (
        "import torch; from rl_modules import functional as F; "
        "f = torch.compile(lambda x: F.policy_gradient_loss(x, x), backend='eager', fullgraph=True); "
        "print(f(torch.full((2,), 3.0, dtype=torch.float32, device='cpu')).item())"
    )
    assert run(code) == "-9.0\n"


@pytest.mark.parametrize("name", F.__all__)
def test_every_name_is_a_documented_function_of_the_file_in_the_table(name):
    function = getattr(F, name)
    assert function.__name__ == name and function.__doc__
    assert function is getattr(import_module(F._EXPORTS[name]), name)


def test_names_table_and_type_checkers_see_the_same():
    assert F.__all__ == sorted(F.__all__) == sorted(F._EXPORTS)
    assert set(F.__all__) <= set(dir(F))
    tree = ast.parse(Path(F.__file__).read_text())
    typed = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {name: typed[name] for name in F.__all__} == F._EXPORTS


#: A backward pass for the memory-saving head of rl_modules.language, which imports it by its file.
NOT_EXPORTED = {  # parts of others
    "token_log_probs_gradient", "log_probs_and_gradient", "divergence_score", "length_desensitized", "importance_ratio",
    "backward_recurrence", "mean_of",
}  # fmt: skip


def test_every_public_function_of_the_files_is_exported():
    folder = Path(F.__file__).parent
    for file in folder.glob("*.py"):
        if file.name in ("__init__.py", "checks.py"):
            continue
        public = {
            node.name
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        assert public - NOT_EXPORTED <= set(F.__all__), file.name
        # A function named like a file of the package would be hidden by that file's import.
        assert file.stem not in F.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'gea'"):
        F.gea  # noqa: B018
