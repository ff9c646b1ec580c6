"""What the pipelines' command lines share: options of stages, and ``rl`` commands run from within Python."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import yaml

from recipes import configs
from rl_modules.errors import UsageError


def stage_options(words: Sequence[str], stages: Sequence[str], example: str) -> dict[str, dict[str, str]]:
    """Each stage's options by dotted name, from words such as ``--ppo.model.beta=0.05``.

    Args:
        words: of the command line.
        stages: the names that there are.
        example: a word that is right, for the message.

    Raises:
        UsageError: a word that is no option of a stage.
    """
    options: dict[str, dict[str, str]] = {stage: {} for stage in stages}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        stage, _, key = name.partition(".")
        if not word.startswith("--") or not equals or stage not in options or not key:
            raise UsageError(f"{word!r} is not understood; an option of a stage is written {example}, and the stages "
                             f"are {', '.join(stages)}")  # fmt: skip
        options[stage][key] = value
    return options


def config_text(config: str) -> str:
    """A config without its comments: on what a stage depends."""
    return yaml.safe_dump(yaml.safe_load(configs.find(config).read_text("utf-8")))


def rl_words(config: str, arguments: dict[str, str]) -> list[str]:
    """The words behind an ``rl`` command.

    Args:
        config: a YAML file, or the name of an installed config.
        arguments: options beside it, by dotted name.
    """
    return ["--config", str(configs.find(config)), *(f"--{key}={value}" for key, value in arguments.items())]


def evaluate(config: str, arguments: dict[str, str]) -> dict[str, float]:
    """What ``rl test`` measures on held-out records, by name, ``eval/…``.

    Args:
        config: an ``rl`` config.
        arguments: options beside it.
    """
    from recipes.lightning_cli import RLCLI

    with contextlib.redirect_stdout(io.StringIO()):
        cli = RLCLI("test", rl_words(config, arguments))
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return {name: value for name, value in sorted(metrics.items()) if name.startswith("eval/")}


def instantiate(config: str, arguments: dict[str, str]) -> Any:
    """Module (``.model``) and datamodule (``.datamodule``) of a config, without running anything."""
    from recipes.lightning_cli import RLCLI

    class Instances(RLCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Do nothing with them."""

    return Instances("test", rl_words(config, arguments))
