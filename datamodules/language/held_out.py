"""Checks that an evaluation's records are held out from training."""

from pathlib import Path
from typing import Any

from datamodules.language.dataset_files import parse_split, split_name
from datamodules.language.notices import notice
from rl_modules.common.errors import UsageError


def check_splits(hparams: Any) -> None:
    """Refuses splits of a source that has none.

    Args:
        hparams: of a language datamodule.

    Raises:
        UsageError: a split is given together with a task or path, or with ``eval_path``.
    """
    if hparams.eval_path is not None and hparams.eval_split != "test":
        raise UsageError(f"eval_split={hparams.eval_split!r} and eval_path={hparams.eval_path!r} both name the "
                         "held-out records; give one")  # fmt: skip
    for name, usual in (("dataset_split", "train"), ("eval_split", "test")):
        if hparams.dataset is None and hparams[name] != usual:
            source = "task" if hparams.task is not None else "path"
            raise UsageError(f"{name}={hparams[name]!r} is a part of a dataset, and {source}={hparams[source]!r} is "
                             "taken whole; a file has parts where it is given as dataset")  # fmt: skip


def require_held_out(hparams: Any, dataset: Any, fits: bool) -> None:
    """Refuses to evaluate a run on its training rows, unless the arguments request it; prints a message if
    ``eval_path`` is the file of ``path``.

    Args:
        hparams: of a language datamodule.
        dataset: a dataset that was given as an object; None: by name.
        fits: whether a run begins, rather than an evaluation alone.

    Raises:
        UsageError: the source is not divided; says how to divide it.
    """
    if hparams.eval_path is not None:
        if fits and hparams.path is not None and Path(hparams.eval_path).resolve() == Path(hparams.path).resolve():
            notice(f"eval_path={hparams.eval_path} is the file of path: evaluations read what the run trains on, and "
                   "the best checkpoint is the one that knows it best")  # fmt: skip
        return
    if hparams.path is not None:
        raise UsageError("evaluation needs eval_path, a JSONL file of held-out records; or set eval_steps=0")
    if dataset is None:
        return
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        raise UsageError("evaluation beside an IterableDataset needs eval_path, a file of held-out records, or an "
                         "IterableDatasetDict with the split of eval_split; or set eval_steps=0")  # fmt: skip
    if not isinstance(dataset, datasets.Dataset) or not fits:
        return
    name = split_name(dataset)
    if parse_split(hparams.eval_split)[0] != name:
        raise UsageError(f"eval_split={hparams.eval_split!r} is no part of dataset, a Dataset of {name!r} rows that "
                         f"are all trained on; give a DatasetDict or eval_path, or divide it by dataset_split="
                         f"'{name}[:90%]' and eval_split='{name}[90%:]', or set eval_steps=0")  # fmt: skip
