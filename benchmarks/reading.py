"""What a person who reads the code passes: files that imports lead to, functions of one batch, names.

    python -m benchmarks.reading               the table: PPO, GRPO, the whole
    python -m benchmarks.reading whole ppo     some of its columns; ``whole`` alone reads the files and runs nothing
    python -m benchmarks.reading page          writes the list of docs/concepts/one_batch.md

Imports count anywhere in a file (``benchmarks.imports``), so that one inside a function hides nothing. A *path* is what
a short ``fit`` under Lightning's Trainer loads; a *batch* is what is called from an epoch's start to the end of its
first optimizer step, after a first epoch. Each is measured in a process of its own.
"""

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.imports import (
    PACKAGES,
    STARTS,
    arrows,
    file_of,
    functions_on_hosts,
    imports_in_functions,
    in_circles,
    reached,
)

ROOT = Path(__file__).parents[1]
OWN = tuple(f"{ROOT / package}/" for package in PACKAGES)
PAGE = ROOT / "docs" / "concepts" / "one_batch.md"
#: The page's list stands between these lines.
BEGIN, END = "<!-- written by python -m benchmarks.reading page -->", "<!-- end of the list -->"
COLUMNS = ("ppo", "grpo", "whole")
#: Functions that save, load or reset state by hand, and with an underscore before the name.
STATE = {"state_dict", "load_state_dict", "rank_state", "load_rank_state", "run_state", "load_run_state",
         "on_save_checkpoint", "on_load_checkpoint", "begin_run", "reset_run", "get_state", "set_state"}  # fmt: skip
#: The table's rows: key and meaning.
ROWS = {
    "files": "own files that imports lead to",
    "lines": "their lines",
    "executed_share": "share of loaded statements that a fit executes",
    "functions": "own functions called by one batch",
    "function_files": "their files",
    "classes": "own classes in the MRO",
    "methods": "their methods and properties",
    "names": "names that a subclass shares",
    "product_files": "product files",
    "product_lines": "product lines",
    "small_files": "files of under 60 lines",
    "refusals": "refusals written out (raise UsageError)",
    "state_functions": "functions of state written by hand",
    "in_circles": "files in circles of imports",
    "imports_in_functions": "own imports inside functions",
    "on_hosts": "functions on an untyped module, data …",
    "private_of_hosts": "private attributes of it that they touch",
    "skips": "lines kept from the formatter",
    "untyped_settings": "arguments of type Any",
}


# ---------------------------------------------------------------- the whole


def product_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def whole() -> dict[str, int]:
    """Counts over all files of the product."""
    texts = [path.read_text("utf-8") for path in product_files()]
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    lines = [text.count("\n") for text in texts]
    return {
        "product_files": len(texts),
        "product_lines": sum(lines),
        "small_files": sum(n < 60 for n in lines),
        "refusals": sum(isinstance(node, ast.Raise) and "id='UsageError'" in ast.dump(node) for node in nodes),
        "state_functions": sum(
            isinstance(node, ast.FunctionDef) and node.name.removeprefix("_") in STATE for node in nodes
        ),
        "imports_in_functions": sum(
            imports_in_functions(tree)
            for tree, path in zip(trees, product_files(), strict=True)
            if path.name != "__init__.py"
        ),
        "on_hosts": sum(functions_on_hosts(tree)[0] for tree in trees),
        "private_of_hosts": sum(functions_on_hosts(tree)[1] for tree in trees),
        "skips": sum(len(re.findall(r"# fmt: (?:skip|off)", text)) for text in texts),
        "untyped_settings": sum(text.count(": Any = setting(") for text in texts),
    }


def reach(algorithm: str) -> dict[str, int]:
    """Counts the files that imports lead to from an algorithm and its datamodule, and their lines."""
    names = {*STARTS[algorithm], *reached(STARTS[algorithm], arrows())}
    lines = [file_of(ROOT, name).read_text("utf-8").count("\n") for name in names]
    return {"files": len(names), "lines": sum(lines)}


# ---------------------------------------------------------------- a path, in a process of its own


def experiment(algorithm: str, batch_only: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Returns module, datamodule and the Trainer's arguments of a short fit; of a batch, without evaluations."""
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False,
                               "enable_checkpointing": False, "enable_model_summary": False}  # fmt: skip
    if algorithm == "ppo":
        from datamodules import RolloutDataModule
        from rl_modules import PPO

        total, evaluations = (10**6, 0) if batch_only else (4096, 2048)
        data = RolloutDataModule("CartPole-v1", total_timesteps=total, n_steps=128, eval_freq=evaluations)
        return PPO(), data, {**options, "max_epochs": 2 if batch_only else -1}
    from datamodules import PromptDataModule
    from rl_modules import GRPO

    n_eval, steps = (0, 0) if batch_only else (8, 2)
    prompts = PromptDataModule(task="addition", num_generations=4, batch_size=16, n_eval=n_eval, eval_steps=steps)
    return GRPO(max_completion_length=6, learning_rate=3e-4), prompts, {**options, "max_steps": 4}


def path(algorithm: str) -> dict[str, float]:
    """The share of loaded statements that a fit executes, and the classes and names of its module."""
    import lightning as L
    from torch import nn

    executed: dict[str, set[int]] = defaultdict(set)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        lines = executed[frame.f_code.co_filename]

        def line(frame: Any, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    sys.settrace(trace)
    module, data, options = experiment(algorithm, batch_only=False)
    L.Trainer(**options).fit(module, datamodule=data)
    sys.settrace(None)
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    files = {name for name in files if name.startswith(OWN)}
    texts = {name: Path(name).read_text("utf-8") for name in files}
    statements = {name: statements_of(text) for name, text in texts.items()}
    classes = [cls for cls in type(module).__mro__ if cls.__module__.partition(".")[0] in PACKAGES]
    shared = {name for cls in classes for name in vars(cls) if not name.startswith("__")}
    instance = {name for name in vars(module) if not name.startswith("_abc")} - vars(nn.Module()).keys()
    return {
        "executed_share": round(sum(len(lines & executed[name]) for name, lines in statements.items())
                                / sum(map(len, statements.values())), 3),
        "classes": len(classes),
        "methods": sum(callable(x) or isinstance(x, property) for cls in classes for x in vars(cls).values()),
        "names": len(shared | instance),
    }  # fmt: skip


def statements_of(text: str) -> set[int]:
    """Lines on which a statement inside a function begins."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.lineno for function in functions for node in ast.walk(function)
            if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef)}  # fmt: skip


def called(algorithm: str) -> dict[str, str | None]:
    """Returns own functions that one batch calls, as ``file:line``, by first calls, each with its first caller."""
    import lightning as L

    seen: dict[str, str | None] = {}
    is_on, newest = False, ""

    def place(frame: Any) -> str | None:
        code = frame.f_code
        if "<" in code.co_name or not code.co_filename.startswith(OWN):
            return None
        return f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{code.co_firstlineno}"

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal newest
        if not is_on or event not in ("call", "return") or (name := place(frame)) is None:
            return
        if event == "return":
            # Lightning closes the iterator of the epoch before: it is entered, and returns at once.
            is_closed = frame.f_code.co_flags & inspect.CO_GENERATOR and argument is None
            if is_closed and name == newest and seen[name] is None:
                del seen[name]
        elif name not in seen:
            caller = frame.f_back
            while caller is not None and place(caller) not in seen:
                caller = caller.f_back
            seen[name] = None if caller is None else place(caller)
            newest = name
            return
        newest = ""

    class Window(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            nonlocal is_on
            is_on = trainer.current_epoch == 1

        def on_train_batch_end(self, *others: Any) -> None:
            nonlocal is_on
            is_on = False

    module, data, options = experiment(algorithm, batch_only=True)
    trainer = L.Trainer(**options, callbacks=[Window()])
    sys.setprofile(profile)
    trainer.fit(module, datamodule=data)
    sys.setprofile(None)
    return seen


def batch(algorithm: str) -> dict[str, int]:
    """Counts the functions of one batch."""
    names = called(algorithm)
    return {"functions": len(names), "function_files": len({name.partition(":")[0] for name in names})}


def measured(part: str, algorithm: str) -> Any:
    """Returns what a function of this module returns in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.reading", "--part", part, algorithm]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "RL_FAST": "1"}  # the page lists the path of a normal run
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{' '.join(command)} ended without a result:\n{done.stderr[-2000:]}")
    return json.loads(found[-1].removeprefix("RESULT "))


def table(columns: list[str]) -> str:
    """Returns the figures as a table."""
    parts = [(part, column) for column in columns if column != "whole" for part in ("path", "batch")]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(measured, *zip(*parts, strict=True))) if parts else []
    figures: dict[str, dict[str, float]] = {column: {} for column in columns}
    for (_, column), result in zip(parts, found, strict=True):
        figures[column].update(result)
    for column in columns:
        if column == "whole":
            figures[column] = {**whole(), "in_circles": len(in_circles(arrows()))}
        else:
            figures[column].update(reach(column))
    lines = [f"{'':<48}" + "".join(f"{column:>9}" for column in columns)]
    for key, meaning in ROWS.items():
        if any(key in figures[column] for column in columns):
            cells = (figures[column].get(key, "") for column in columns)
            lines.append(f"{meaning:<48}" + "".join(f"{cell:>9,}" if cell != "" else " " * 9 for cell in cells))
    return "\n".join(lines)


# ---------------------------------------------------------------- the page


@cache
def functions_of(file: str) -> dict[int, tuple[str, str]]:
    """Returns name and first sentence of each function of a file, by its first line, which may be a decorator's."""
    found = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found[first] = name, first_sentence(ast.get_docstring(child) or "")
            walk(child, f"{name}." if isinstance(child, ast.ClassDef | ast.FunctionDef) else prefix)

    walk(ast.parse((ROOT / file).read_text("utf-8")), "")
    return found


def first_sentence(docstring: str) -> str:
    """Returns the first sentence of a docstring in Markdown."""
    text = " ".join(docstring.partition("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", text).replace("``", "`")
    return re.split(r"(?<=\w{3}\.) |(?<=\W\.) ", text)[0]


def page_block(page: str) -> str:
    """Returns the page's list: functions below their first callers, in the order of their first calls.

    A function without a docstring keeps the sentence that the page has for it.
    """
    written = dict(re.findall(r"^ *- `([^`]+)` \(`[^`]+`\): (.+)$", page, re.MULTILINE))
    callers = measured("called", "ppo")
    lines: list[str] = []

    def write(caller: str | None, depth: int) -> None:
        for place in [place for place, first in callers.items() if first == caller]:
            file, _, line = place.partition(":")
            name, sentence = functions_of(file)[int(line)]
            lines.append(f"{'    ' * depth}- `{name}` (`{file}`): {sentence or written.get(name, '')}".rstrip())
            write(place, depth + 1)

    write(None, 0)
    return "\n".join(lines)


def with_block(page: str) -> str:
    """Returns the page with the list as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{page_block(page)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"{', '.join(COLUMNS)}, or page")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {*COLUMNS, "page"}:
        parser.error(f"{unknown.pop()!r} is none of {', '.join(COLUMNS)}, page")
    if arguments.part:
        part, algorithm = arguments.part
        print("RESULT " + json.dumps({"path": path, "batch": batch, "called": called}[part](algorithm)))
    elif "page" in arguments.what:
        PAGE.write_text(with_block(PAGE.read_text("utf-8")), "utf-8")
    else:
        print(table(arguments.what or list(COLUMNS)))


if __name__ == "__main__":
    main()
