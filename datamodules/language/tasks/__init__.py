"""Tasks with verifiers, by name or import path."""

from typing import Any

from datamodules.language.tasks.base import Record, RewardFunction, Task
from datamodules.registered import REASONING_GYM
from rl_modules.common.errors import UsageError, what_happened
from rl_modules.common.loading import load_object, require_settings

__all__ = ["TASKS", "Record", "RewardFunction", "Task", "make_task"]

#: Built-in tasks, imported when they are made.
TASKS = {
    "addition": "datamodules.language.tasks.simple:Addition",
    "reverse": "datamodules.language.tasks.simple:Reverse",
    "sort": "datamodules.language.tasks.simple:Sort",
    "countdown": "datamodules.language.tasks.countdown:Countdown",
    "dots": "datamodules.language.tasks.pictures:Dots",
    "paths": "datamodules.language.tasks.paths:Paths",
}


def make_task(name: Any, seed: int = 0, **settings: Any) -> Task:
    """Returns a task from its name.

    Args:
        name: a built-in task, ``reasoning_gym:<dataset>``, ``package.module:Class`` of your own, or a task.
        seed: of the questions drawn.
        **settings: the task's own.

    Raises:
        UsageError: an unknown name, an import path without a task, a setting that the task does not have.
    """
    if isinstance(name, Task):
        if settings:
            raise UsageError(f"a task that is made already takes no settings, but {', '.join(settings)} came")
        return name
    if name.startswith(REASONING_GYM):
        from datamodules.language.tasks.reasoning import ReasoningGym

        return ReasoningGym(seed, name.removeprefix(REASONING_GYM), **settings)
    factory = load_object(TASKS.get(name, name), "task", [*TASKS, f"{REASONING_GYM}<dataset>"], "a Task class")
    require_settings(factory, {"seed": seed, **settings}, f"task {name!r}")
    try:
        task = factory(seed=seed, **settings)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"task {name!r} can't be made: {what_happened(error)}") from error
    if not isinstance(task, Task):
        raise UsageError(
            f"task={name!r} made a {type(task).__name__}, where a datamodules.language.tasks.Task should be"
        )
    return task
