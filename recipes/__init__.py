"""Programs to run and to copy: one per algorithm, the pipelines, the ``rl`` command, and ``Trainer`` for Python."""

from typing import TYPE_CHECKING, Any

__all__ = ["Trainer"]

if TYPE_CHECKING:
    from recipes.trainer import Trainer


def __getattr__(name: str) -> Any:
    # Imported when it is first used: commands such as `rl list` import no Lightning.
    if name == "Trainer":
        from recipes.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
