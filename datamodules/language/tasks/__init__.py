"""Tasks with verifiers."""

from datamodules.language.tasks.base import Record, RewardFunction, Task, bayes_accuracy
from datamodules.language.tasks.registry import TASKS, make_task

__all__ = ["TASKS", "Record", "RewardFunction", "Task", "bayes_accuracy", "make_task"]
