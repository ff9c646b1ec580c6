"""What the pipelines' command lines share: options of stages, and ``rl`` commands run from within Python."""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from recipes import configs
from rl_modules.common.errors import UsageError


def run_command(run: Callable[..., None], parse: Callable[[list[str]], tuple], args: list[str] | None) -> None:
    """A pipeline's command: ``run(*parse(args))``, without the libraries' chatter.

    Args:
        run: the pipeline.
        parse: what makes its arguments of the words.
        args: the words; None: ``sys.argv``'s.

    Raises:
        SystemExit: with 1 after an error, which is printed in one sentence.
    """
    from recipes.cli import quiet

    quiet()
    try:
        run(*parse(sys.argv[1:] if args is None else args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


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
    from recipes.cli.lightning_cli import RLCLI

    with contextlib.redirect_stdout(io.StringIO()):
        cli = RLCLI("test", rl_words(config, arguments))
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return {name: value for name, value in sorted(metrics.items()) if name.startswith("eval/")}


def instantiate(config: str, arguments: dict[str, str]) -> Any:
    """Module (``.model``) and datamodule (``.datamodule``) of a config, without running anything."""
    from recipes.cli.lightning_cli import RLCLI

    class Instances(RLCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Do nothing with them."""

    return Instances("test", rl_words(config, arguments))


def write_completions(
    module: Any, prompts: Sequence[str], seeds: Sequence[int], num_generations: int, **sampling: Any
) -> tuple[list[str], list[list[int]], list[bool]]:
    """What a policy writes to prompts: texts, token ids, and whether each has come to its end.

    Args:
        module: the policy, built.
        prompts: P texts.
        seeds: one per completion, P · num_generations.
        num_generations: completions per prompt, which stand next to each other.
        sampling: settings that differ from the module's own.
    """
    import torch

    tokens = [list(ids) for ids in module.tokenizer(list(prompts)).input_ids]
    with torch.no_grad():
        written = module.act(tokens, seeds, num_generations, **sampling)
    ids = [row[:n] for row, n in zip(written.tokens.tolist(), written.length.tolist(), strict=True)]
    return module.tokenizer.batch_decode(ids, skip_special_tokens=True), ids, written.finished.tolist()
