"""What lies at the top of the repository."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {".ci", ".github", "benchmarks", "configs", "datamodules", "docs", "recipes", "rl_modules", "tests"}
FILES = {".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md",
         "constraints-min.txt", "constraints.txt", "mkdocs.yml", "pyproject.toml"}  # fmt: skip


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_nothing_else_is_committed():
    """A file that a run or a trial left in the working folder does not get in."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {path.split("/")[0] for path in listed} == FOLDERS | FILES
