"""The Trainer's settings that follow from the command: loggers, progress bar and the command's own callbacks."""

import inspect
import os
import sys
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import ProgressBar

from datamodules.base import ControlDataModule
from recipes.callbacks.recorder import EpisodeRecorder
from recipes.run import bar_of
from rl_modules.common.errors import UsageError
from rl_modules.core.settings import Setting

#: Ranges of the Trainer's numbers.
NUMBERS = {
    **dict.fromkeys(("accumulate_grad_batches", "num_nodes", "check_val_every_n_epoch"), Setting(1, "", least=1)),
    **dict.fromkeys(("max_steps", "max_epochs"), Setting(-1, "", least=-1)),
    **dict.fromkeys(("gradient_clip_val", "log_every_n_steps"), Setting(0.0, "", least=0)),
}
#: Environment variables of programs that start a process per machine or device.
LAUNCHERS = ("MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID", "KUBERNETES_PORT", "OMPI_COMM_WORLD_RANK")


def settings_for_fit(trainer: Any, record_every: int, data: Any) -> list:
    """Sets the progress bar of ``fit``; returns the callbacks to add."""
    if record_every and not isinstance(data, ControlDataModule):
        raise UsageError("record_every films episodes of an environment; leave it out for a language model")
    # Lightning calls every callback about ten times per batch, so only useful ones are added.
    callbacks: list = [EpisodeRecorder(record_every)] if record_every else []
    given = trainer.get("callbacks") or []
    has_bar = any(isinstance(callback, ProgressBar) for callback in (given if isinstance(given, list) else [given]))
    shows = trainer.get("enable_progress_bar") is not False and (sys.stderr.isatty() or has_bar)
    trainer["enable_progress_bar"] = shows
    if shows and not has_bar:
        callbacks.append(bar_of(data))
    return callbacks


def check(trainer: Any, writes: bool) -> None:
    """Refuses arguments of a Trainer, which ``writes``, that Lightning would answer with a traceback, or not at all."""
    for name, setting in NUMBERS.items():
        if trainer.get(name) is not None:
            setting.of_kind(type(setting.default)).checked(f"trainer.{name}", trainer[name])
    if trainer.get("barebones"):
        raise UsageError("trainer.barebones=true keeps neither curves nor checkpoints, which `rl fit` writes; leave it "
                         "out, or give it to Lightning's own Trainer in Python")  # fmt: skip
    accelerator = trainer.get("accelerator")
    kinds = [name for name in ("cuda", "mps") if accelerator == "gpu"] or [accelerator]
    known = [AcceleratorRegistry.get(name) for name in kinds if name in AcceleratorRegistry]
    if known and not any(one.is_available() for one in known):
        raise UsageError(f"trainer.accelerator={accelerator} finds no such device here; give auto or cpu")
    if trainer.get("max_steps") == 0:
        raise UsageError("trainer.max_steps=0 trains nothing; give the number of optimizer steps, or -1 for no limit")
    if trainer.get("limit_train_batches") == 0:
        raise UsageError("trainer.limit_train_batches=0 trains nothing; give a number or a share of batches, or leave "
                         "it out")  # fmt: skip
    if (trainer.get("num_nodes") or 1) > 1 and not any(name in os.environ for name in LAUNCHERS):
        raise UsageError(f"trainer.num_nodes={trainer['num_nodes']} would wait for other machines, which nothing has "
                         "started; start the command on each by torchrun or SLURM")  # fmt: skip
    given = trainer.get("logger")
    loggers = given if isinstance(given, list) else [given]
    saves = [getattr(getattr(logger, "init_args", None), "save_dir", None) for logger in loggers]
    for folder in (trainer.get("default_root_dir"), *saves):
        parts = [] if folder is None or "://" in str(folder) else [Path(folder), *Path(folder).parents]
        there = next((part for part in parts if part.exists()), None)
        if there is not None and (there.is_file() or (writes and not os.access(there, os.W_OK))):
            why = f"{there} is a file" if there.is_file() else f"{there.resolve()} can't be written"
            raise UsageError(f"the logs would go into the folder {folder}, but {why}; give another with "
                             "--trainer.default_root_dir")  # fmt: skip


def sentence(error: BaseException, trainer: Any) -> str:
    """Returns Lightning's message about the Trainer's arguments, after those that it may be about."""
    text = " ".join(str(error).split())
    defaults = inspect.signature(Trainer.__init__).parameters
    given = {name: value for name, value in vars(trainer).items()
             if isinstance(value, str | int | float) and value != defaults[name].default}  # fmt: skip
    named = {name: value for name, value in given.items() if name in text} or given
    return f"{', '.join(f'trainer.{name}={value}' for name, value in named.items())} can't be used: {text}"
