"""Reinforcement-learning algorithms as LightningModules.

Classes are imported when they are first used, so that a control task pays for no language model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "PPO": "rl_modules.ppo",
}

__all__ = ["PPO"]

if TYPE_CHECKING:
    from rl_modules.ppo import PPO


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
