"""Experience as LightningDataModules.

Classes are imported when they are first used, so that control tasks do not import the language-model libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import register, registry

import rl_modules  # noqa: F401  (defers some of Lightning's imports)

_EXPORTS = {
    "InstructionDataModule": "datamodules.language.instruction",
    "PreferenceDataModule": "datamodules.language.preference",
    "PromptDataModule": "datamodules.language.prompt",
    "ReplayDataModule": "datamodules.replay",
    "RolloutDataModule": "datamodules.rollout",
}

__all__ = ["InstructionDataModule", "PreferenceDataModule", "PromptDataModule", "ReplayDataModule", "RolloutDataModule"]

if TYPE_CHECKING:
    from datamodules.language.instruction import InstructionDataModule
    from datamodules.language.preference import PreferenceDataModule
    from datamodules.language.prompt import PromptDataModule
    from datamodules.replay import ReplayDataModule
    from datamodules.rollout import RolloutDataModule

# Registered by name alone: the environment is imported when it is made.
if "Maze-v0" not in registry:
    register("Maze-v0", entry_point="datamodules.envs.maze:Maze", max_episode_steps=100)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
