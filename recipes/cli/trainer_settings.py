"""The Trainer's settings that follow from the command: loggers, progress bar and the command's own callbacks."""

import sys
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from recipes import language
from recipes.callbacks.episode_writer import EpisodeWriter
from recipes.callbacks.progress import TransitionProgressBar
from recipes.callbacks.recorder import EpisodeRecorder
from rl_modules.common.errors import UsageError


def settings_for_fit(trainer: Any, record_every: int, is_control: bool) -> list:
    """Sets the progress bar of ``fit``; returns the callbacks to add.

    Args:
        trainer: the Trainer's part of the config, which is changed.
        record_every: transitions between two recorded episodes; 0: none.
        is_control: whether the run acts in environments.

    Raises:
        UsageError: recording is asked of a language model.
    """
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
    """Turns off loggers, and the progress bar unless it is asked for: the result is printed or written to a file."""
    trainer["logger"] = False
    if trainer.get("enable_progress_bar") is None:
        trainer["enable_progress_bar"] = False


def prediction_writer(output: str | None, is_control: bool) -> Any:
    """Returns the callback that writes the episodes, or a language model's completions, to a file."""
    if is_control:
        return EpisodeWriter(output or "episodes.csv")
    return language.CompletionWriter(output or "completions.csv")
