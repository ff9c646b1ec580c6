"""Training and evaluation mode of modules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets modules to evaluation mode within the context, and restores each module's mode afterwards.

    ``Module.eval`` and ``Module.train`` go through torch's bookkeeping of attributes for every part, which takes longer
    than a small network's action.

    Args:
        modules: a module's parts, itself among them: ``module.modules()``, or a list of that kept for many calls.
    """
    parts = [part for part in modules if part.training]
    for part in parts:
        part.__dict__["training"] = False
    try:
        yield
    finally:
        for part in parts:
            part.__dict__["training"] = True
