"""Checks of the language datamodules' arguments that depend on each other, and what a checkpoint holds of them."""

from pathlib import Path
from typing import Any

from datamodules.language.dataset_files import describe_dataset, parse_split, split_name
from datamodules.language.notices import notice
from rl_modules.common.errors import UsageError


def check_arguments(hp: Any) -> None:
    """Refuses arguments of a language datamodule that exclude each other."""
    given = [name for name in ("task", "path", "dataset") if hp[name] is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of task, path and dataset; got {' and '.join(given) or 'none'}")
    if hp.eval_path is not None and hp.eval_split != "test":
        raise UsageError(f"eval_split={hp.eval_split!r} and eval_path={hp.eval_path!r} both name the held-out records; "
                         "give one")  # fmt: skip
    for name, usual in (("dataset_split", "train"), ("eval_split", "test")):
        if hp.dataset is None and hp[name] != usual:
            raise UsageError(f"{name}={hp[name]!r} is a part of a dataset, and {given[0]}={hp[given[0]]!r} is taken "
                             "whole; a file has parts where it is given as dataset")  # fmt: skip
    for name in ("columns", "answer_after"):
        if hp.get(name) is not None and hp.task is not None:
            raise UsageError(f"{name}={hp[name]!r} is for a file or dataset, and task={hp.task!r} makes its records as "
                             "they are; leave it out")  # fmt: skip
    if hp.dataset_config is not None and hp.dataset is None:
        raise UsageError(f"dataset_config={hp.dataset_config!r} is a dataset's, and none is given")
    if hp.streaming and (hp.task is not None or hp.n_train is not None):
        name = "task" if hp.task is not None else "n_train"
        raise UsageError(f"streaming=true reads a file or dataset whole, pass after pass; {name}={hp[name]!r} "
                         "can't go with it")  # fmt: skip
    if hp.task_kwargs and hp.task is None:
        raise UsageError(f"task_kwargs={hp.task_kwargs} are settings of a task, but none is given")


def require_held_out(data: Any, fits: bool) -> None:
    """Refuses to evaluate a run on its training rows, unless the arguments request it; prints a message if
    ``eval_path`` is the file of ``path``.
    """
    if data.eval_path is not None:
        if fits and data.path is not None and Path(data.eval_path).resolve() == Path(data.path).resolve():
            notice(f"eval_path={data.eval_path} is the file of path: evaluations read what the run trains on, and "
                   "the best checkpoint is the one that knows it best")  # fmt: skip
        return
    if data.path is not None:
        raise UsageError("evaluation needs eval_path, a JSONL file of held-out records; or set eval_steps=0")
    dataset = data.dataset
    if isinstance(dataset, str | None):
        return
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        raise UsageError("evaluation beside an IterableDataset needs eval_path, a file of held-out records, or an "
                         "IterableDatasetDict with the split of eval_split; or set eval_steps=0")  # fmt: skip
    if not isinstance(dataset, datasets.Dataset) or not fits:
        return
    name = split_name(dataset)
    if parse_split(data.eval_split)[0] != name:
        raise UsageError(f"eval_split={data.eval_split!r} is no part of dataset, a Dataset of {name!r} rows that "
                         f"are all trained on; give a DatasetDict or eval_path, or divide it by dataset_split="
                         f"'{name}[:90%]' and eval_split='{name}[90%:]', or set eval_steps=0")  # fmt: skip


def check_chat_template(name: str, value: Any) -> Any:
    """Refuses a template, which belongs to the tokenizer."""
    if not isinstance(value, bool | None):
        raise UsageError(f"{name}={value!r} must be true or false; the template itself belongs to the tokenizer, as "
                         "chat_template.jinja in its folder")  # fmt: skip
    return value


def name_of_dataset(value: Any) -> Any:
    """Replaces a dataset that is an object by a description."""
    return value if isinstance(value, str | None) else describe_dataset(value)


def named_functions(value: Any) -> Any:
    """Replaces reward functions, which are code, by their import paths, which a checkpoint may hold."""
    if isinstance(value, list | tuple):
        return [named_functions(part) for part in value]
    if callable(value):
        target = getattr(value, "func", value)  # functools.partial
        return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__qualname__)}"
    return value
