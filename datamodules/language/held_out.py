"""Checks that an evaluation's records are held out from training."""

from pathlib import Path
from typing import Any

from datamodules.language.dataset_files import parse_split, split_name
from datamodules.language.notices import notice
from rl_modules.common.errors import UsageError


def require_held_out(data: Any, fits: bool) -> None:
    """Refuses to evaluate a run on its training rows, unless the arguments request it; prints a message if
    ``eval_path`` is the file of ``path``.

    Args:
        data: the language datamodule.
        fits: whether a run begins, rather than an evaluation alone.

    Raises:
        UsageError: the source is not divided; says how to divide it.
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
