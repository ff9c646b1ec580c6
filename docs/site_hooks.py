"""Builds what the site derives from the repository: pages of quoted files, notebooks, configs and errors."""

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
#: Packages whose errors a person meets.
PACKAGES = ("rl_modules", "datamodules", "recipes")
TITLES = {"kl": "KL", "rlhf": "RLHF", "grpo": "GRPO", "linalg": "Linear algebra"}
FIELDS = ("Run", "Expect", "Cost", "Source", "Device")


def outside(page: str, link: str) -> Path | None:
    """Returns the repository's file or folder that a page links to outside ``docs``; None for other links."""
    target = (DOCS / page).parent.joinpath(link).resolve()
    if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT) or not target.exists():
        return None
    return target


def source_page(target: Path) -> str:
    """Returns the site's path of a page that shows a file or lists a folder."""
    return f"source/{target.relative_to(ROOT).as_posix()}.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    linked = {
        target
        for page in DOCS.rglob("*.md")
        for match in LINK.finditer(page.read_text("utf-8"))
        if (target := outside(page.relative_to(DOCS).as_posix(), match[2])) is not None
    }
    pages = {source_page(target): show(target) for target in linked}
    pages["reference/configs.md"] = config_page()
    pages["reference/errors.md"] = error_page()
    pages["reference/functional.md"] = functional_page()
    pages.update(class_pages())
    config.nav = [with_classes(entry) for entry in config.nav]
    for notebook in sorted((DOCS / "ladder").glob("*.ipynb")):
        page, pictures = notebook_page(notebook)
        pages[f"ladder/{notebook.stem}.md"] = page
        for name, picture in pictures.items():
            files.append(File.generated(config, f"ladder/{name}", content=picture))
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


#: Reference pages whose classes and functions have a page each.
SPLIT = tuple(f"reference/{name}.md" for name in ("algorithms", "language", "datamodules", "callbacks"))
OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
#: The page's title is the heading of its class.
WITHOUT_HEADING = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"


def class_page(page: str, path: str) -> str:
    """Returns the site's path of the page of one class or function."""
    return f"{page.removesuffix('.md')}/{path.rpartition('.')[2]}.md"


def class_pages() -> dict[str, str]:
    """Returns the pages of the classes and functions that the pages of :data:`SPLIT` list."""
    return {
        class_page(page, match[1]): f"# {match[1].rpartition('.')[2]}\n\n::: {match[1]}\n{WITHOUT_HEADING}"
        for page in SPLIT
        for match in OBJECT.finditer((DOCS / page).read_text("utf-8"))
    }


def with_classes(entry: Any) -> Any:
    """Returns an entry of the navigation where the pages of :data:`SPLIT` have those of their classes below them."""
    if isinstance(entry, dict):
        return {title: with_classes(inside) for title, inside in entry.items()}
    if isinstance(entry, list):
        return [with_classes(inside) for inside in entry]
    if entry not in SPLIT:
        return entry
    paths = [match[1] for match in OBJECT.finditer((DOCS / entry).read_text("utf-8"))]
    return [entry, *({path.rpartition(".")[2]: class_page(entry, path)} for path in paths)]


def class_line(page: str, path: str) -> str:
    """Returns the link to a class or function, with the first sentence of its docstring."""
    module, _, name = path.rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    found = next(node for node in tree.body if getattr(node, "name", "") == name)
    says = (ast.get_docstring(found) or "").partition("\n\n")[0].replace("\n", " ")  # type: ignore[arg-type]
    link = class_page(page, path).removeprefix("reference/")
    return f"[`{name}`]({link}): {says}"


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Points links to files outside ``docs`` to their pages on the site."""
    here = page.file.src_uri
    if here in SPLIT:
        markdown = OBJECT.sub(lambda match: f"- {class_line(here, match[1])}", markdown)
    up = "../" * here.count("/")

    def replace(match: re.Match) -> str:
        target = outside(here, match[2])
        return match[0] if target is None else f"{match[1]}{up}{source_page(target)}{match[4]}"

    return LINK.sub(replace, markdown)


#: A page's scripts, by the mark that they look for. They are part of the site: nothing is fetched from elsewhere.
SCRIPTS = {
    'class="arithmatex"': ("katex.min.js", "equations.js"),
    'class="mermaid"': ("mermaid.min.js",),
}


def on_post_page(output: str, page: Any, **others: Any) -> str:
    """Adds the scripts for equations and diagrams to the pages that have some."""
    up = "../" * page.url.count("/")
    scripts = "".join(
        f'<script src="{up}javascripts/{name}"></script>\n'
        for mark, names in SCRIPTS.items()
        if mark in output
        for name in names
    )
    # Before the theme's own script, which would fetch what it misses.
    head, foot, tail = output.partition("</head>")
    return head + scripts + foot + tail if scripts else output


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook as a page, and its pictures by name."""
    parts, pictures = [], {}
    cells = json.loads(path.read_text("utf-8"))["cells"]
    title = "".join(cells[0]["source"]).lstrip("# ").partition("\n")[0]
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{title}: plot {len(pictures)}]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    parts.append(f"[This page as a notebook]({path.name})")
    return "\n\n".join(parts) + "\n", pictures


def show(target: Path) -> str:
    """Returns a page with a file's text, or the names in a folder."""
    name = target.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# `{name}`\n\n"
    if target.is_dir():
        names = sorted(path.name + "/" * path.is_dir() for path in target.iterdir() if path.name[0] not in "._")
        return head + "\n".join(f"- `{entry}`" for entry in names)
    language = {".py": "python", ".yaml": "yaml", ".md": "markdown", ".toml": "toml"}.get(target.suffix, "text")
    return f"{head}`````{language}\n{target.read_text('utf-8')}\n`````\n"


def header(path: Path) -> tuple[str, dict[str, str]]:
    """Returns a config's description and the fields of its header."""
    lines = [line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")]
    fields: dict[str, str] = {}
    name = None
    for line in lines[1:]:
        word, _, rest = line.partition(" ")
        if word in FIELDS:
            name, fields[word] = word, rest.strip()
        elif name is not None:
            fields[name] += " " + line.strip()
    return lines[0], fields


def config_page() -> str:
    """Returns the table of all configs with what their headers say."""
    text = ["# Configs", "", "What each config trains, what to expect of it and what that costs, as its header says. "
            "`rl list` prints the names, `rl copy NAME FILE` copies one.", ""]  # fmt: skip
    for folder in sorted((ROOT / "configs").iterdir()):
        if not folder.is_dir() or not list(folder.glob("*.yaml")):
            continue
        text += [f"## {folder.name}", "", "| config | what | expect | cost | source |", "|---|---|---|---|---|"]
        for path in sorted(folder.glob("*.yaml")):
            what, fields = header(path)
            cells = [f"`{folder.name}/{path.name}`", what.split(": ", 1)[-1],
                     *(fields.get(field, "—") for field in FIELDS[1:4])]  # fmt: skip
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        text.append("")
    return "\n".join(text)


def message(node: ast.expr) -> str | None:
    """Returns the text of an error's argument with its values in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
        )
    return None


def errors_of(path: Path) -> list[str]:
    """Returns the messages of the UsageErrors that a module raises."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        is_error = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UsageError"
        if is_error and node.args and (text := message(node.args[0])):
            found.append(" ".join(text.split()))
    return found


def error_page() -> str:
    """Returns the list of all errors that a person can cause."""
    text = ["# Errors", "", "Every mistake that a person can make is a `UsageError` of one sentence: the argument, its "
            "value, and the remedy. `rl` prints it after `error:` and exits with code 1. Values stand in braces here; "
            "search this page for the words around them. Shapes that do not fit in `rl_modules.functional` are "
            "`ValueError`s that name the argument.", ""]  # fmt: skip
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if found := errors_of(path):
                text += [f"## {path.relative_to(ROOT).as_posix()}", ""]
                text += [f"- `` {sentence} ``" for sentence in dict.fromkeys(found)] + [""]
    return "\n".join(text)


def functional_page() -> str:
    """Returns the page of the functional core, one section per module."""
    text = ["# Functions", "", "The equations as pure functions of tensors: `from rl_modules import functional as F`. "
            "Losses return a scalar to minimise; a mask counts where it is 1 or true.", ""]  # fmt: skip
    for path in sorted((ROOT / "rl_modules/functional").glob("*.py")):
        names = public(path)
        if names:
            text += [f"## {TITLES.get(path.stem, path.stem.replace('_', ' ').capitalize())}", ""]
            text += [f"::: rl_modules.functional.{path.stem}.{name}" for name in names] + [""]
    return "\n".join(text)


def public(path: Path) -> list[str]:
    """Returns the functions of a module that ``rl_modules.functional`` exports."""
    if path.stem.startswith("_"):
        return []
    exported = (ROOT / "rl_modules/functional/__init__.py").read_text("utf-8")
    names = [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_") and f'"{name}"' in exported]
