"""Deferred imports of the two packages that take most of the time to import Lightning, and that few runs use.

Lightning imports torchmetrics for the class ``Metric`` and ``torch._dynamo`` for the class ``OptimizedModule``; torch's
optimizers import ``torch._dynamo`` for two functions that do nothing outside a compiled graph. The two packages import
SymPy, and SciPy, Transformers and Matplotlib where those are installed.

The modules are the real ones: only their code runs later, at the first access to a name that is not listed here.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from rl_modules.fast import is_fast

Early = Mapping[str, Callable[[], Any]]


class DeferredModule(ModuleType):
    """A module whose code runs at the first access to a name that is not in ``early``."""

    early: Early

    def __getattr__(self, name: str) -> Any:
        if name in self.early:
            value = self.early[name]()
            setattr(self, name, value)
            return value
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(load(self), name)


def load(module: ModuleType, again: bool = False) -> ModuleType:
    """Runs the code of a deferred module if it has not run yet."""
    if isinstance(module, DeferredModule) or again:
        loader: Any = module.__loader__
        for name in (*loader.early, "early"):
            vars(module).pop(name, None)
        module.__class__ = ModuleType
        loader.real.exec_module(module)
        if module.__name__ == "torch._dynamo":
            _forget_disabled()
    return module


class _DeferringLoader(Loader):
    """Creates a module without running its code."""

    def __init__(self, real: Loader, early: Early) -> None:
        self.real, self.early = real, early

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = DeferredModule
        vars(module)["early"] = self.early

    def __getattr__(self, name: str) -> Any:
        # `pkgutil.get_data` and `inspect.getsource` ask the loader for more.
        return getattr(self.real, name)


class _ImportedLoader(Loader):
    """Returns a module that its parent's code has imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _DeferringFinder(MetaPathFinder):
    """Defers the modules of ``early``. Submodules of ``torch._dynamo`` need its code, those of torchmetrics do not."""

    def __init__(self, early: Mapping[str, Early]) -> None:
        self.early = early

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith("torch._dynamo.") and isinstance(parent := sys.modules["torch._dynamo"], DeferredModule):
            load(parent)
            if name in sys.modules:
                return ModuleSpec(name, _ImportedLoader(sys.modules[name]))
        if name not in self.early:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader, self.early[name])
        return spec


class _CompiledOrNot(type):
    """Answers ``isinstance`` with torch's class, once something has imported it."""

    def __instancecheck__(cls, value: Any) -> bool:
        module = sys.modules["torch._dynamo"]
        return not isinstance(module, DeferredModule) and isinstance(value, module.OptimizedModule)


class OptimizedModule(metaclass=_CompiledOrNot):
    """Stands for ``torch._dynamo.OptimizedModule`` in ``isinstance`` before anything is compiled."""


#: Functions that were disabled before Dynamo was loaded; since nothing could trace them, they are not wrapped.
_disabled: list[Any] = []


def _disable(function: Any = None, recursive: bool = True, **named: Any) -> Any:
    """``torch._dynamo.disable`` while nothing can be traced."""
    if function is None:
        return load(sys.modules["torch._dynamo"]).disable(function, recursive, **named)
    _disabled.append(function)
    return function


def _forget_disabled() -> None:
    """Makes torch ask Dynamo again how to call the functions that were disabled before it was loaded."""
    for function in _disabled:
        vars(function).pop("__dynamo_disable", None)
    _disabled.clear()


def _graph_break(msg: str = "") -> None:
    """``torch._dynamo.graph_break`` outside a graph."""


def _metric(name: str, file: str) -> Callable[[], Any]:
    """Returns a function that imports a class of torchmetrics from its file."""

    def get() -> Any:
        try:
            import_module("torchmetrics.utilities")  # imports torchmetrics.metric, which can't be imported first
            return getattr(import_module(file), name)
        except ImportError:
            # The files of another version need more of the package, which must then be imported in its own order.
            for imported in [name for name in sys.modules if name.startswith("torchmetrics.")]:
                del sys.modules[imported]
            return getattr(load(sys.modules["torchmetrics"], again=True), name)

    return get


def _plot(*args: Any, **named: Any) -> Any:
    """``torchmetrics.utilities.plot.plot_single_or_multi_val``."""
    return load(import_module("torchmetrics.utilities.plot")).plot_single_or_multi_val(*args, **named)


_EARLY: Mapping[str, Early] = {
    "torchmetrics": {
        "_logger": lambda: logging.getLogger("torchmetrics"),
        "Metric": _metric("Metric", "torchmetrics.metric"),
        "MetricCollection": _metric("MetricCollection", "torchmetrics.collections"),
    },
    "torchmetrics.utilities.plot": {  # imports matplotlib; the types stand in annotations
        "_AX_TYPE": lambda: Any,
        "_PLOT_OUT_TYPE": lambda: Any,
        "plot_single_or_multi_val": lambda: _plot,
    },
    "torch._dynamo": {
        "OptimizedModule": lambda: OptimizedModule,
        "disable": lambda: _disable,
        "graph_break": lambda: _graph_break,
    },
}


def defer_imports() -> None:
    """Defers torchmetrics and ``torch._dynamo``, which must not be imported yet; the ``rl`` command calls it first."""
    if is_fast() and not any(isinstance(finder, _DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeferringFinder(_EARLY))
