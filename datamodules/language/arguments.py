"""Arguments of the language datamodules, what a checkpoint holds of them, and what they make of evaluations."""

import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import lightning as L

from datamodules.experience import ExperienceDataModule, evaluate_on_start
from datamodules.language.files import name_of
from datamodules.language.tasks.base import RewardFunction, Task
from datamodules.registered import code_of_names, code_of_settings, code_of_task
from rl_modules.common.errors import UsageError, require_one
from rl_modules.common.notices import notice
from rl_modules.core.settings import Converted, made, setting


def check_files(name: str, value: Any) -> Any:
    """Refuses what names no file, such as a dataset; None alone is no file."""
    for file in value.values() if isinstance(value, dict) else [] if value is None else [value]:
        if not isinstance(file, str | os.PathLike):
            raise UsageError(
                f"{name} has a {type(file).__name__}, where the name of a file should be; give datasets "
                "as dataset, held-out rows as a split of a DatasetDict"
            )
    return value


def named_functions(value: Any) -> Any:
    """Replaces reward functions, which are code, by their import paths, which a checkpoint may hold."""
    if isinstance(value, list | tuple):
        return [named_functions(part) for part in value]
    if isinstance(value, dict):
        return {key: named_functions(part) for key, part in value.items()}
    if callable(value):
        target = getattr(value, "func", value)  # functools.partial
        return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__qualname__)}"
    return value


#: A task, or sources of several; a file names them.
GivenTask = Annotated[str | Sequence[dict[str, Any]] | Task | None, str | list[dict[str, Any]] | None]
#: One reward function, or several.
GivenFunctions = RewardFunction | str | dict[str, Any] | Sequence[RewardFunction | str | dict[str, Any]]
#: Attribute of a Trainer with the ``val_check_interval`` that a datamodule has set from its ``eval_steps``.
_OWN_INTERVAL = "_interval_of_eval_steps"
#: The sources of records with which an argument is read, of those that are not read with all.
_SOURCES_OF = {
    "dataset_split": ("dataset",),
    "eval_split": ("dataset",),
    "dataset_config": ("dataset",),
    "columns": ("path", "dataset"),
    "answer_after": ("path", "dataset"),
    "streaming": ("path", "dataset"),
    "task_kwargs": ("task",),
}


class LanguageArguments(ExperienceDataModule):
    """The arguments of the language datamodules, and the checks of one against another."""

    #: Columns that training records must have, and held-out ones.
    required: tuple[str, ...] = made(("prompt",))
    eval_required: tuple[str, ...] = made(("prompt",))
    #: Columns of files and datasets that are read as text; reward functions get the others as they are.
    texts: ClassVar[tuple[str, ...]] = ()
    #: Held-out records per evaluation where ``n_eval`` is not given.
    usual_n_eval: ClassVar[int] = 256

    task: Converted[GivenTask, Any] = setting(
        default=None,
        says="a built-in task (addition, reverse, sort, countdown, paths), ``reasoning_gym:<dataset>``, or the import "
        "path of a Task; or a list of sources with weights, ``[{name: addition, weight: 2}, {path: more.jsonl}]``. "
        "None: ``path`` or ``dataset``",
        kw_only=False,
        stores=named_functions,
        code=code_of_task,
    )
    task_kwargs: dict[str, Any] | None = setting(default=None, says="the task's own settings", code=code_of_settings)
    path: str | None = setting(
        default=None, says="JSONL, parquet, arrow or csv file of training records", check=check_files
    )
    eval_path: str | dict[str, str] | None = setting(
        default=None,
        says="JSONL, parquet, arrow or csv file of held-out records, whatever the training records come from; or "
        "several by name, ``{easy: easy.jsonl, hard: hard.jsonl}``, each with metrics of its own",
        check=check_files,
    )
    dataset: Annotated[Iterable[Any] | None, str | None] = setting(
        default=None,
        says="hub name, directory or file that ``datasets`` reads; in Python also a ``datasets.Dataset`` or "
        "``DatasetDict``",
        stores=lambda value: None if value is None else name_of(value),
    )
    dataset_config: str | None = setting(default=None, says="the hub dataset's configuration")
    dataset_split: str = setting(default="train", says="split to train on, or a part of it, ``train[:90%]``")
    eval_split: str | None = setting(
        default=None,
        says="split of the dataset to evaluate on, or a part of it; without ``eval_path``. None: ``test`` under "
        "``eval_steps``, else none",
        idle=lambda data: data.eval_path is not None and "beside eval_path; leave that out",
    )
    columns: dict[str, str] | None = setting(
        default=None,
        says="source column of each record column, ``{prompt: question}``, or a template of several, ``{prompt: "
        '"{context} {question}"}``; None: same names',
    )
    answer_after: str | None = setting(
        default=None, says="keep only the part of the answer after this text, such as ``####``"
    )
    system_prompt: str | None = setting(
        default=None,
        says="first message of every conversation without a system message of its own, for models with a chat template",
    )
    chat_template: bool | None = setting(
        default=None,
        says="render prompts with the tokenizer's chat template; None: where it has one",
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        default=None,
        says="variables of the chat template, such as ``{enable_thinking: false}``; a record's own column of that "
        "name wins",
    )
    overlong: str = setting(
        default="error",
        says="what to do with records that the model can't take: ``error``, or ``drop`` with a printed count",
        one_of=("error", "drop"),
    )
    streaming: bool = setting(
        default=False,
        says="read training records as they are needed, so that they need not fit into memory: from a JSONL, "
        "parquet, arrow or csv file, a hub dataset, or in Python an ``IterableDataset``. Held-out records are "
        "loaded",
    )
    streaming_buffer: int = setting(
        default=10_000,
        says="records that are shuffled together while streaming; two such blocks are in memory",
        least=1,
    )
    n_train: int | None = setting(
        default=None,
        says="training records; None: all (10,000 of a task with more than 100,000 questions, or without an end)",
        least=1,
    )
    n_eval: int | None = setting(
        default=None,
        says="held-out records per evaluation, over all ranks; 0: none. None: 256 (of preferences 1,024), or all where "
        "there are fewer",
        least=0,
    )
    batch_size: int = setting(
        default=64,
        says="sequences (or pairs) per optimizer step and rank; ``trainer.accumulate_grad_batches`` divides it into "
        "micro-batches without changing the step",
        least=1,
    )
    reward_funcs: Annotated[GivenFunctions | None, list[str | dict[str, Any]] | str | dict[str, Any] | None] = setting(
        default=None,
        says="one or several names or import paths of reward functions (TRL's signature), with settings as "
        "``{length_reward: {target: 20}}``; None: the task's own, and none without a task. The first one decides "
        "whether a completion is right: its value must reach ``correct_threshold``",
        stores=named_functions,
        code=code_of_names,
    )
    reward_time_limit_s: float | None = setting(
        default=None, says="longest that one reward function may take for one batch; None: no limit", above=0
    )
    reward_workers: int = setting(
        default=1,
        says="reward calls that run at once, in threads; above 1 a function gets the batch in parts, each of whole "
        "prompts. For functions that wait for a service or a process, and may be called from several threads",
        least=1,
    )
    reward_overlap: bool = setting(
        default=False,
        says="call the reward functions on a prompt's completions as soon as they have ended, while others are "
        "written. Each function then gets the completions of one prompt per call, from threads",
    )
    correct_threshold: float = setting(
        default=1.0, says="least value of the first reward function that counts as right"
    )
    eval_steps: int = setting(
        default=0,
        says="optimizer steps between evaluations, in place of the Trainer's ``val_check_interval``; 0: none",
        least=0,
    )
    eval_on_start: bool = setting(
        default=True,
        says="where there are evaluations, evaluate before the first update too. A resumed run does not repeat it",
    )
    eval_num_generations: int = setting(
        default=1,
        says="completions per held-out prompt, the k of pass@k and cons@k",
        least=1,
        idle=lambda data: (
            data.eval_temperature == 0
            and "at eval_temperature=0, where completions of a prompt are all the same; set that above 0"
        ),
    )
    eval_temperature: float = setting(default=0.0, says="of those completions; 0: the likeliest words", least=0)
    eval_top_p: float | None = setting(
        default=None, says="nucleus of those completions; None: all words", above=0, most=1
    )
    eval_max_completion_length: int | None = setting(default=None, says="tokens; None: the module's", least=1)
    eval_batch_size: int = setting(default=256, says="completions (or pairs) that are computed together", least=1)
    seed: int = setting(
        default=0, says="the source of every stream of randomness: tasks, order, sampling, new weights", least=0
    )

    def __post_init__(self) -> None:
        hp = self.hparams
        given = require_one({name: hp[name] for name in ("task", "path", "dataset")})
        for name, sources in _SOURCES_OF.items():
            usual = self.declared_settings[name].default if name in self.declared_settings else None
            if given not in sources and hp.get(name) not in (None, {}, usual):
                raise UsageError(
                    f"{name}={hp[name]!r} is read with a {' or '.join(sources)}, and the records "
                    f"come from {given}={hp[given]!r}; leave it out, or give a "
                    f"{sources[-1]}"
                )
        if self.streaming and self.n_train is not None:
            raise UsageError(
                f"streaming=true reads a file or dataset whole, pass after pass; n_train={self.n_train} can't go "
                "with it"
            )

    @property
    def n_held_out(self) -> int:
        """Held-out records per evaluation at most: ``n_eval``, or the usual number."""
        return self.usual_n_eval if self.n_eval is None else self.n_eval

    @property
    def held_out_split(self) -> str:
        """Split of a dataset that evaluations read."""
        return "test" if self.eval_split is None else self.eval_split


def evaluate_every(trainer: L.Trainer, steps: int, on_start: bool) -> None:
    """Makes a fit evaluate after every ``steps`` optimizer steps (0: never), and before the first update."""
    evaluate_on_start(trainer, on_start and steps > 0)
    # Lightning sets no number where the interval is a time.
    given = getattr(trainer, "val_check_interval", "a time")
    if given not in (1.0, getattr(trainer, _OWN_INTERVAL, None)) and not (steps and given == "a time"):
        notice(
            f"val_check_interval={given} of the Trainer has no effect: eval_steps={steps} is the number of "
            "optimizer steps between evaluations (0: none)"
        )
    if steps:
        trainer.val_check_interval = steps * trainer.accumulate_grad_batches
        setattr(trainer, _OWN_INTERVAL, trainer.val_check_interval)
        trainer.check_val_every_n_epoch = None
