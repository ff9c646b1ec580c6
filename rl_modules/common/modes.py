"""Training and evaluation mode of modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, for a module and all its parts; then each is as it was.

    ``Module.eval`` and ``Module.train`` go through torch's bookkeeping of attributes for every part, which takes longer
    than a small network's action.
    """
    parts = [part for part in module.modules() if part.training]
    for part in parts:
        part.__dict__["training"] = False
    try:
        yield
    finally:
        for part in parts:
            part.__dict__["training"] = True
