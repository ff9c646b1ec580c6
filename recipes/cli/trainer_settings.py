"""The Trainer's settings that follow from the command: loggers, progress bar and the command's own callbacks."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from recipes import language
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.episode_writer import EpisodeWriter
from recipes.callbacks.progress import TransitionProgressBar
from recipes.callbacks.recorder import EpisodeRecorder
from recipes.cli.sentences import one_sentence
from rl_modules.common.errors import UsageError

#: Least values of the Trainer's numbers.
LEAST = {
    "accumulate_grad_batches": 1, "num_nodes": 1, "check_val_every_n_epoch": 1, "log_every_n_steps": 0,
    "gradient_clip_val": 0, "max_steps": -1, "max_epochs": -1,
}  # fmt: skip
#: Environment variables of programs that start a process per machine or device.
LAUNCHERS = ("MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID", "KUBERNETES_PORT", "OMPI_COMM_WORLD_RANK")


def settings_for_fit(trainer: Any, record_every: int, is_control: bool) -> list:
    """Sets the progress bar of ``fit``; returns the callbacks to add."""
    if record_every and not is_control:
        raise UsageError("record_every films episodes of an environment; leave it out for a language model")
    # Lightning calls every callback about ten times per batch, so only useful ones are added.
    callbacks: list = [EpisodeRecorder(record_every)] if record_every else []
    given = trainer.get("callbacks") or []
    has_bar = any(isinstance(callback, ProgressBar) for callback in (given if isinstance(given, list) else [given]))
    shows = trainer.get("enable_progress_bar") is not False and (sys.stderr.isatty() or has_bar)
    trainer["enable_progress_bar"] = shows
    if shows and not has_bar:
        callbacks.append(TransitionProgressBar() if is_control else language.StepProgressBar())
    return callbacks


def settings_for_evaluation(trainer: Any) -> None:
    """Turns off loggers, and the progress bar unless it is requested: the result is printed or written to a file."""
    trainer["logger"] = False
    if trainer.get("enable_progress_bar") is None:
        trainer["enable_progress_bar"] = False


def stop_writing(trainer: Any) -> None:
    """Makes the run write no checkpoint."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, Checkpoints):
            raise UsageError(f"trainer.enable_checkpointing=false contradicts the callback {type(callback).__name__}; "
                             "leave one of them out")  # fmt: skip
        callback.writes = False


def prediction_writer(output: str | None, is_control: bool) -> Any:
    """Returns the callback that writes the episodes, or a language model's completions, to a file."""
    if is_control:
        return EpisodeWriter(output or "episodes.csv")
    return language.CompletionWriter(output or "completions.csv")


def check(trainer: Any) -> None:
    """Refuses values of the Trainer's arguments that Lightning would answer with a traceback, or not at all."""
    if not hasattr(trainer, "get"):
        raise UsageError(
            f"trainer={trainer!r} must be a mapping of the Trainer's arguments, such as {{max_steps: 100}}"
        )
    for name, least in LEAST.items():
        value = trainer.get(name)
        if value is not None and value < least:
            raise UsageError(f"trainer.{name}={value} must be at least {least}")
    if trainer.get("max_steps") == 0:
        raise UsageError("trainer.max_steps=0 trains nothing; give the number of optimizer steps, or -1 for no limit")
    if trainer.get("limit_train_batches") == 0:
        raise UsageError("trainer.limit_train_batches=0 trains nothing; give a number or a share of batches, or leave "
                         "it out")  # fmt: skip
    if (trainer.get("num_nodes") or 1) > 1 and not any(name in os.environ for name in LAUNCHERS):
        raise UsageError(f"trainer.num_nodes={trainer['num_nodes']} would wait for other machines, which nothing has "
                         "started; start the command on each by torchrun or SLURM")  # fmt: skip
    root = trainer.get("default_root_dir")
    logger = trainer.get("logger")
    folders = [root, getattr(getattr(logger, "init_args", None), "save_dir", None)]
    for folder in folders:
        parts = [] if folder is None else [Path(folder), *Path(folder).parents]
        if blocked := next((part for part in parts if part.is_file()), None):
            raise UsageError(f"the logs would go into the folder {folder}, but {blocked} is a file; give another with "
                             "--trainer.default_root_dir")  # fmt: skip


def require_writable(trainer: Any) -> None:
    """Refuses folders of a training run in which nothing can be written: it would end in a traceback."""
    given = trainer.get("logger")
    loggers = given if isinstance(given, list) else [given]
    saves = [getattr(getattr(logger, "init_args", None), "save_dir", None) for logger in loggers]
    for folder in (trainer.get("default_root_dir"), *saves):
        if folder is None or "://" in str(folder):  # a store elsewhere
            continue
        parts = [Path(folder), *Path(folder).parents]
        there = next((part for part in parts if part.is_dir()), None)
        if there is not None and not os.access(there, os.W_OK):
            raise UsageError(f"the logs would go into the folder {folder}, but {there.resolve()} can't be written; "
                             "give another with --trainer.default_root_dir")  # fmt: skip


def sentence(error: BaseException, config: Any) -> str:
    """Returns Lightning's error about the Trainer's arguments, with the argument's name and the remedy."""
    text = one_sentence(str(error))
    trainer = config["trainer"]
    if "backend found" in text or "No supported gpu" in text:
        return f"trainer.accelerator={trainer.get('accelerator')} finds no such device here; give auto or cpu"
    if "requires a GPU accelerator" in text:
        return f"trainer.strategy={trainer.get('strategy')} needs GPUs; on CPUs give ddp, or leave it out"
    if "barebones=True, " in text:
        return ("trainer.barebones=true keeps neither curves nor checkpoints, which `rl fit` writes; leave it out, or "
                "give it to Lightning's own Trainer in Python")  # fmt: skip
    if (named := re.search(r"Trainer\((devices|num_nodes)=", text)) and trainer.get(named.group(1)) is not None:
        return f"trainer.{named.group(1)}={trainer.get(named.group(1))!r} can't be used: {text}"
    for name in ("profiler", "accelerator", "strategy", "devices", "precision", "gradient_clip_algorithm", "max_time"):
        if name in text and trainer.get(name) is not None:
            return f"trainer.{name}={trainer.get(name)!r} can't be used: {text}"
    if "is not a valid duration" in text:
        return f"trainer.max_time={trainer.get('max_time')!r} must be DD:HH:MM:SS, such as 00:01:30:00"
    if "`mode` can be" in text:
        return f"checkpoint.mode={config['checkpoint'].get('mode')!r} must be min or max"
    return text
