"""``rl learn``: copies the field guide's notebooks, and opens them in JupyterLab."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from rl_modules.common.errors import UsageError

#: The first notebook, by which the folder is found.
FIRST = "01_dynamic_programming.ipynb"


def learn(folder: Path, opens: bool) -> None:
    """Copies the notebooks into a folder, where yours stay as you left them, and opens it unless ``opens`` is false."""
    if opens and importlib.util.find_spec("jupyterlab") is None:
        raise UsageError("JupyterLab is missing: pip install jupyterlab matplotlib; or only copy them: rl learn "
                         "--copy_only")  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(_source().iterdir()):
        is_part = source.suffix == ".ipynb" or source.name in ("helpers.py", "curves.json", "glossary.md")
        if is_part and not (folder / source.name).exists():
            shutil.copyfile(source, folder / source.name)
    print(f"the notebooks are in {folder}; the first is {folder / FIRST}")
    if opens:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(folder / FIRST)])


def _source() -> Path:
    """The folder of the notebooks, in a checkout or installed from a wheel."""
    checkout = Path(__file__).resolve().parents[2] / "docs" / "ladder"
    if (checkout / FIRST).is_file():
        return checkout
    try:
        files = importlib.metadata.files("lightning-rl-recipes") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FIRST:
            return Path(str(file.locate())).resolve().parent
    raise UsageError("the notebooks are not installed here; they are in docs/ladder of the project's repository")
