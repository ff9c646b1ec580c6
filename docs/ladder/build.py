"""Executes the ladder's scripts as notebooks and writes their pages.

python docs/ladder/build.py                                every rung
python docs/ladder/build.py 09_ppo                         the rungs whose names contain these words
python docs/ladder/build.py 09_ppo --notebook ppo.ipynb    also keep the executed notebook
"""

import argparse
import os
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

HERE = Path(__file__).resolve().parent


def scripts() -> list[Path]:
    """Returns the rungs in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def execute(script: Path) -> nbformat.NotebookNode:
    """Runs a script as a notebook; an error in a cell is raised."""
    notebook = jupytext.read(script)
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(HERE)}})
    # Under another backend, such as a build server's Agg, cells would show no pictures.
    client.execute(env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    for cell in notebook.cells:
        if "outputs" in cell:  # warnings of the libraries name paths of the machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def write(notebook: nbformat.NotebookNode, name: str, folder: Path) -> Path:
    """Writes a page and its pictures; returns the page."""
    pictures = folder / f"{name}_files"
    if pictures.exists():
        for old in pictures.iterdir():
            old.unlink()
    body, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": pictures.name})
    for path, content in resources["outputs"].items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    page = folder / f"{name}.md"
    page.write_text(described(body).strip() + "\n", "utf-8")
    return page


def described(body: str) -> str:
    """Returns a page whose pictures have a description instead of ``png``."""
    title = body.lstrip("# ").partition("\n")[0].strip()
    return body.replace("![png]", f"![{title}: plot]")


def main() -> None:
    """Builds pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the pages are written")
    parser.add_argument("--notebook", type=Path, help="file for the executed notebook of a single rung")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    for script in scripts():
        if not options.names or any(word in script.stem for word in options.names):
            began_s = time.monotonic()
            notebook = execute(script)
            write(notebook, script.stem, options.folder)
            if options.notebook is not None:
                nbformat.write(notebook, options.notebook)
            print(f"{script.stem}  {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
