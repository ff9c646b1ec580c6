"""Programs to run and to copy: one per algorithm, the pipelines, the ``rl`` command, and ``Trainer`` and ``compare``
for Python.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["Trainer", "compare"]

if TYPE_CHECKING:
    from recipes.comparison import compare
    from recipes.trainer import Trainer


def __getattr__(name: str) -> Any:
    # Imported when it is first used: commands such as `rl list` import no Lightning.
    if name == "Trainer":
        from recipes.trainer import Trainer

        return Trainer
    if name == "compare":
        from recipes.comparison import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
