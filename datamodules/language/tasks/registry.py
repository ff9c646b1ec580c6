"""Tasks by name or import path."""

from typing import Any

from datamodules.language.loading import load_object, require_settings
from datamodules.language.tasks.base import Task
from rl_modules.errors import UsageError

#: Built-in tasks, imported when they are made.
TASKS = {
    "addition": "datamodules.language.tasks.addition:Addition",
}


def make_task(name: str | Task, seed: int = 0, **settings: Any) -> Task:
    """A task from its name.

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
    factory = load_object(TASKS.get(name, name), "task", TASKS)
    require_settings(factory, {"seed": seed, **settings}, f"task {name!r}")
    task = factory(seed=seed, **settings)
    if not isinstance(task, Task):
        raise UsageError(
            f"task={name!r} made a {type(task).__name__}, where a datamodules.language.tasks.Task should be"
        )
    return task
