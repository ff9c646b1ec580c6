"""Records, tasks with verifiers, and reward functions for language models; imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "RecordImages": "datamodules.language.images",
    "RewardFunctions": "datamodules.language.reward_calls",
    "Task": "datamodules.language.tasks.base",
    "bayes_accuracy": "datamodules.language.tasks.paths",
    "load_records": "datamodules.language.on_demand",
    "load_reward_func": "datamodules.language.rewards",
    "make_task": "datamodules.language.tasks",
    "with_images": "datamodules.language.images",
}

__all__ = [
    "RewardFunctions",
    "Task",
    "bayes_accuracy",
    "load_records",
    "load_reward_func",
    "make_task",
]

if TYPE_CHECKING:
    from datamodules.language.images import RecordImages as RecordImages
    from datamodules.language.images import with_images as with_images
    from datamodules.language.on_demand import load_records
    from datamodules.language.reward_calls import RewardFunctions
    from datamodules.language.rewards import load_reward_func
    from datamodules.language.tasks import make_task
    from datamodules.language.tasks.base import Task
    from datamodules.language.tasks.paths import bayes_accuracy


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
