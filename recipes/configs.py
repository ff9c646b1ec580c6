"""Finds, lists and copies the installed configs and notebooks. Imports nothing heavy."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from rl_modules.common.errors import UsageError, did_you_mean

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def names() -> list[str]:
    """Returns the names of all configs, ``recipe/task.yaml``."""
    return sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.glob("*/*.yaml"))


def sweeps() -> list[str]:
    """Returns the names of all installed sweeps, ``sweeps/recipe/task.yaml``."""
    return sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.glob("sweeps/*/*.yaml"))


def short_name(argument: str) -> str:
    """Returns an argument for display: an installed config's path as its name, anything else as it is."""
    path = Path(argument)
    return path.relative_to(CONFIGS).as_posix() if path.is_relative_to(CONFIGS) else argument


def find(name: str) -> Path:
    """Returns the file that ``--config name`` means: a path, or an installed config."""
    if Path(name).is_file():
        return Path(name)
    for candidate in (name, f"{name}.yaml"):
        if (CONFIGS / candidate).is_file():
            return CONFIGS / candidate
    if (CONFIGS / name.lower()).is_dir() and name.strip("./"):
        known = [other for other in names() if other.startswith(f"{name.lower().rstrip('/')}/")]
        raise UsageError(f"config {name!r} names an algorithm; its configs are {', '.join(known)}")
    if Path(name).is_dir():
        raise UsageError(
            f"config {name!r} is a folder; give one of the files in it, or an installed config (`rl list` shows all)"
        )
    raise UsageError(f"config {name!r} is neither a file nor an installed config{_near(name)} (`rl list` shows all)")


def checked(path: Path) -> dict[str, Any]:
    """Reads a config, which must be a YAML mapping in which no key stands twice; YAML would silently keep the last."""
    try:
        text = path.read_bytes().decode("utf-8")
        content = yaml.safe_load(text)  # a tag would make a Python object
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        mark: Any = getattr(error, "problem_mark", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        raise UsageError(f"{place}: not a valid YAML file in UTF-8, {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path} holds {content!r:.60}, where a config has the keys model, data and perhaps trainer")
    pending = [yaml.compose(text, yaml.SafeLoader)]
    while pending:
        node: Any = pending.pop()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        names = [key.value for key, _ in pairs]
        for i, (key, value) in enumerate(pairs):
            wrong = "is given twice" if key.value in names[:i] and key.value != "<<" else ""
            if "class_path" in names and key.value not in ("class_path", "init_args", "dict_kwargs"):
                wrong = "stands beside class_path; an argument of the class stands below init_args"
            elif key.value == "init_args" and value.tag.endswith(":null"):
                wrong = "is empty; leave it out"
            if wrong:
                raise UsageError(f"{path}:{key.start_mark.line + 1}: the key {key.value!r} {wrong}")
        pending += [value for _, value in pairs] if pairs else node.value if isinstance(node, yaml.SequenceNode) else []
    return content


def text(name: str) -> str:
    """Returns a config without its comments, on which a run of it depends."""
    return yaml.safe_dump(yaml.safe_load(find(name).read_text("utf-8")))


def _near(name: str) -> str:
    """Returns the configs that a name may mean: those of that task, or with a similar name."""
    task = re.sub(r"\W|v\d+$|yaml$", "", name.rpartition("/")[2].lower().removesuffix(".yaml"))
    same = [other for other in names() if re.sub(r"\W|_", "", Path(other).stem) == re.sub(r"_", "", task)]
    if "/" not in name and same:
        return f"; did you mean {' or '.join(sorted(same, key=lambda other: not other.startswith('ppo/'))[:3])}?"
    return did_you_mean(name, names())


def describe(name: str) -> str:
    """Returns a config's one-line description, its first comment line; marks configs that were never run to the end."""
    lines = header(name)
    description = lines[0].lstrip("# ").rstrip()
    unknown = ("experimental", "not run", "not measured")
    is_experimental = any(line.removeprefix("# Expect").strip().startswith(unknown) for line in lines)
    return f"[experimental] {description}" if is_experimental else description


def header(name: str) -> list[str]:
    """Returns the comment lines that a config opens with."""
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def copy(name: str, target: str) -> Path:
    """Copies an installed config to ``target``, a file or an existing folder."""
    source, path = find(name), Path(target)
    if path.is_dir():
        path = path / source.name
    if path.exists():
        raise UsageError(f"{path} exists already; choose another name, or remove it first")
    shutil.copyfile(source, path)
    return path


# ---------------------------------------------------------------- the field guide's notebooks

#: The first notebook, by which the folder is found.
FIRST = "00_bandits.ipynb"


def learn(folder: Path, opens: bool) -> None:
    """Copies the notebooks into a folder, where yours stay as you left them, and opens it unless ``opens`` is false."""
    if opens and importlib.util.find_spec("jupyterlab") is None:
        raise UsageError(
            "JupyterLab is missing: pip install jupyterlab matplotlib; or only copy them: rl learn --copy_only"
        )
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
    checkout = CONFIGS.parent / "docs" / "ladder"
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
