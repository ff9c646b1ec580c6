"""Checks of the language datamodules' arguments, some of which exclude each other."""

from typing import Any

from datamodules.language.held_out import check_splits
from rl_modules.common.checks import at_least
from rl_modules.common.errors import UsageError

_LEAST = {"batch_size": 1, "streaming_buffer": 1, "eval_num_generations": 1, "eval_batch_size": 1, "n_eval": 0,
          "eval_steps": 0, "seed": 0}  # fmt: skip


def check_arguments(hp: Any) -> None:
    """Refuses arguments out of range, and those without effect with the others; converts whole numbers to ``int``.

    Ranges that all datamodules share are checked by :func:`~rl_modules.common.ranges.check_ranges`.

    Args:
        hp: hyperparameters of a language datamodule, changed in place.

    Raises:
        UsageError: names the argument, its value and what would be right.
    """
    given = [name for name in ("task", "path", "dataset") if hp[name] is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of task, path and dataset; got {' and '.join(given) or 'none'}")
    check_splits(hp)
    for name in ("columns", "answer_after"):
        if hp[name] is not None and hp.task is not None:
            raise UsageError(f"{name}={hp[name]!r} is for a file or dataset, and task={hp.task!r} makes its records as "
                             "they are; leave it out")  # fmt: skip
    if hp.dataset_config is not None and hp.dataset is None:
        raise UsageError(f"dataset_config={hp.dataset_config!r} is a dataset's, and none is given")
    if not isinstance(hp.chat_template, bool | None):
        raise UsageError(f"chat_template={hp.chat_template!r} must be true or false; the template itself belongs to "
                         "the tokenizer, as chat_template.jinja in its folder")  # fmt: skip
    if hp.streaming and (hp.task is not None or hp.n_train is not None):
        name = "task" if hp.task is not None else "n_train"
        raise UsageError(f"streaming=true reads a file or dataset whole, pass after pass; {name}={hp[name]!r} "
                         "can't go with it")  # fmt: skip
    for name, least in _LEAST.items():
        hp[name] = at_least(name, hp[name], least)
    if hp.eval_temperature < 0:
        raise UsageError(f"eval_temperature={hp.eval_temperature} must be at least 0")
    if hp.task_kwargs and hp.task is None:
        raise UsageError(f"task_kwargs={hp.task_kwargs} are settings of a task, but none is given")
    if hp.overlong not in ("error", "drop"):
        raise UsageError(f"overlong={hp.overlong!r} must be error or drop")


def named_functions(value: Any) -> Any:
    """Replaces reward functions, which are code, by their import paths, which a checkpoint may hold.

    Args:
        value: of ``reward_funcs``.
    """
    if isinstance(value, list | tuple):
        return [named_functions(part) for part in value]
    if callable(value):
        target = getattr(value, "func", value)  # functools.partial
        return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__qualname__)}"
    return value
