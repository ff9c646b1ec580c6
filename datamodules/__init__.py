"""Experience as LightningDataModules.

Classes are imported when they are first used, so that control tasks do not import the language-model libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import register, registry

from rl_modules.common.foreign_names import refuse_import

_EXPORTS = {
    "InstructionDataModule": "datamodules.language.instruction",
    "PreferenceDataModule": "datamodules.language.preference",
    "PromptDataModule": "datamodules.language.prompt",
    "ReplayDataModule": "datamodules.replay",
    "RolloutDataModule": "datamodules.rollout",
    "check_env": "datamodules.check",
}

#: The classes; :func:`datamodules.check.check_env` can be imported from here too.
__all__ = ["InstructionDataModule", "PreferenceDataModule", "PromptDataModule", "ReplayDataModule", "RolloutDataModule"]

if TYPE_CHECKING:
    from datamodules.check import check_env as check_env
    from datamodules.language.instruction import InstructionDataModule
    from datamodules.language.preference import PreferenceDataModule
    from datamodules.language.prompt import PromptDataModule
    from datamodules.replay import ReplayDataModule
    from datamodules.rollout import RolloutDataModule

# Registered by name alone: the environment is imported when it is made.
if "Maze-v0" not in registry:
    register("Maze-v0", entry_point="datamodules.envs.maze:Maze", max_episode_steps=100)
# In torch: training steps in the vector, evaluation in the environment of the same name without torch/.
for _name in ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Maze-v0"):
    if f"torch/{_name}" not in registry:
        register(
            f"torch/{_name}",
            entry_point=registry[_name].entry_point,
            vector_entry_point=f"datamodules.envs.torch:{_name.partition('-')[0]}",
            max_episode_steps=registry[_name].max_episode_steps,
        )


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    refuse_import(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
