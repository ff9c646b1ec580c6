"""Where imports lead to, anywhere in a file: reach, circles, imports in functions; and functions on others' objects."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

PACKAGES = ("rl_modules", "datamodules", "recipes")
#: Where a reader of an algorithm begins.
STARTS = {
    "ppo": ("rl_modules.ppo", "datamodules.rollout"),
    "grpo": ("rl_modules.language.grpo", "datamodules.language.prompt"),
}
#: Names of a first argument under which a function works on somebody else's object.
HOSTS = ("module", "data", "datamodule", "learner", "trainer", "collector", "policy", "source")


@cache
def arrows() -> dict[str, frozenset[str]]:
    """Returns the own modules that each imports, not for type checkers alone; a package's face has none."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    packages = {name.rpartition(".")[0] for name in graph.modules}
    return {
        name: frozenset() if name in packages else frozenset(graph.find_modules_directly_imported_by(name))
        for name in graph.modules
    }


def reached(starts: Iterable[str], graph: dict[str, frozenset[str]]) -> set[str]:
    """Returns the modules that imports lead to from some; a start is among them if a circle leads back to it."""
    seen: set[str] = set()
    rest = list(starts)
    while rest:
        new = graph.get(rest.pop(), frozenset()) - seen
        seen |= new
        rest += new
    return seen


def in_circles(graph: dict[str, frozenset[str]]) -> set[str]:
    """Returns the modules from which imports lead back to them."""
    return {name for name in graph if name in reached([name], graph)}


def file_of(root: Path, name: str) -> Path:
    """Returns the file of a module."""
    place = root / name.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def imports_in_functions(tree: ast.AST) -> int:
    """Counts own imports inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node): node for function in functions for node in ast.walk(function)}.values()
    names = [node.module or "" for node in inside if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in inside if isinstance(node, ast.Import) for alias in node.names]
    return sum(name.partition(".")[0] in PACKAGES for name in names)


def functions_on_hosts(tree: ast.Module) -> tuple[int, int]:
    """Counts free functions whose first argument is an untyped host, and the private attributes of it they touch."""
    functions, private = 0, 0
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.args.args:
            continue
        host = node.args.args[0]
        if host.arg in HOSTS and (host.annotation is None or ast.unparse(host.annotation) == "Any"):
            functions += 1
            private += sum(
                isinstance(x, ast.Attribute)
                and x.attr.startswith("_")
                and not x.attr.startswith("__")
                and isinstance(x.value, ast.Name)
                and x.value.id == host.arg
                for x in ast.walk(node)
            )
    return functions, private
