"""Executes the field guide's scripts and writes them as notebooks, whose pages the site shows.

python docs/ladder/build.py            every rung
python docs/ladder/build.py 09 10      the rungs whose names contain one of these words
python docs/ladder/build.py --text     only the text: outputs are kept from the last execution

A rung is written in ``NN_name.py``, cells and text in the "percent" form that Jupyter (with jupytext), VS Code and
PyCharm open; ``NNb_name.py`` stands between ``NN`` and the next number, so that no page changes its number.
``NN_name.ipynb`` is that file with its outputs.
"""

import argparse
import os
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def scripts() -> list[Path]:
    """Returns the rungs in order."""
    return sorted(HERE.glob("[0-9][0-9]*_*.py"))


def execute(script: Path) -> nbformat.NotebookNode:
    """Runs a script as a notebook; an error in a cell is raised."""
    notebook = as_notebook(script)
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(HERE)}})
    # Under another backend, such as a build server's Agg, cells would show no pictures.
    client.execute(env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if "outputs" in cell:  # warnings of the libraries name paths of the machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def with_kept_outputs(script: Path) -> nbformat.NotebookNode:
    """Returns a script as a notebook with the outputs of its last execution; for changes of text."""
    notebook = as_notebook(script)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    written = [cell for cell in nbformat.read(script.with_suffix(".ipynb"), 4).cells if cell.cell_type == "code"]
    for cell, old in zip(cells, written, strict=True):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return notebook


def as_notebook(script: Path) -> nbformat.NotebookNode:
    """Returns a script as a notebook without outputs, with cell ids that do not change from build to build."""
    notebook = jupytext.read(script)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return notebook


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes a notebook."""
    path.write_text(nbformat.writes(notebook) + "\n", "utf-8")


def main() -> None:
    """Builds notebooks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the notebooks are written")
    parser.add_argument("--text", action="store_true", help="do not execute; keep the outputs")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    for script in scripts():
        if not options.names or any(word in script.stem for word in options.names):
            began_s = time.monotonic()
            notebook = with_kept_outputs(script) if options.text else execute(script)
            write(notebook, options.folder / f"{script.stem}.ipynb")
            print(f"{script.stem}  {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
