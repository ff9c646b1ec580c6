"""Shared code of the pipelines' command lines: options of stages, and ``rl`` commands run from Python."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import configs
from recipes.pipeline import Pipeline
from rl_modules.common.errors import UsageError, did_you_mean

#: Options of the Trainer that set the number of processes in which a stage trains.
PROCESSES = ("trainer.devices", "trainer.num_nodes", "trainer.strategy")


def run_command(run: Callable[..., None], parse: Callable[[list[str]], tuple], args: list[str] | None) -> None:
    """Runs a pipeline's command, ``run(*parse(args))``, without the libraries' messages."""
    from recipes.cli.terminal import quiet

    quiet()
    try:
        run(*parse(sys.argv[1:] if args is None else args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def stage_options(
    words: Sequence[str], stages: Sequence[str], own: Iterable[str], example: str
) -> dict[str, dict[str, str]]:
    """Each stage's options by dotted name, from words such as ``--ppo.model.beta=0.05``."""
    options: dict[str, dict[str, str]] = {stage: {} for stage in stages}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        stage, _, key = name.partition(".")
        if not word.startswith("--") or not equals or stage not in options or not key:
            raise UsageError(f"{word!r} is not understood; an option of a stage is written {example}, and the stages "
                             f"are {', '.join(stages)}{did_you_mean(stage, [*stages, *own])}")  # fmt: skip
        options[stage][key] = value
    return options


def check_stages(stages: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, Any]:
    """Checks configs and options of all stages before the first: each is parsed, and its classes are made."""
    if "LOCAL_RANK" in os.environ:
        raise UsageError(f"LOCAL_RANK={os.environ['LOCAL_RANK']}: a pipeline starts the processes of its stages "
                         "itself; run it once, without torchrun, and give a stage trainer.devices")  # fmt: skip
    for _, config, _ in stages.values():
        configs.checked(configs.find(config))
    found = {}
    for stage, (command, config, options) in stages.items():
        try:
            words = rl_words(config, in_one_process(options) if command == "test" else options)
            found[stage] = checked(command, words).datamodule
        except UsageError as error:
            raise UsageError(f"stage {stage}: {error}") from error
    return found


def world_size(words: Sequence[str]) -> int:
    """Number of processes that ``rl fit`` trains in."""
    return int(checked("fit", words).trainer.world_size)


def checked(command: str, words: Sequence[str]) -> Any:
    """Returns the parsed command with its objects, which has run nothing."""
    from recipes.cli.lightning_cli import RLCLI
    from rl_modules.core.seams import check_pairing

    class Checked(RLCLI):
        def _require_weights(self, config: Any) -> None:
            """Does nothing: an earlier stage will write them."""

        def _check_environment(self) -> None:
            check_pairing(self.model, self.datamodule)

        def _run_subcommand(self, subcommand: str) -> None:
            """Runs nothing."""

    return Checked(command, list(words))


def in_one_process(arguments: Mapping[str, str]) -> dict[str, str]:
    """Returns options for a pipeline's own use of a policy, on one device."""
    devices = str(arguments.get("trainer.devices", "1"))
    if devices != "1":
        raise UsageError(f"trainer.devices={devices}: evaluations and comparisons run in the pipeline's own process; "
                         "give several devices to the stages that train")  # fmt: skip
    return {**arguments, "trainer.devices": "1"}


def writing_options(options: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of a policy's stage that determine its prompts and completions in an evaluation."""
    names = {f"model.{name}" for name in ("max_completion_length", "top_k", "min_p", "repetition_penalty")}
    return {key: value for key, value in options.items() if key.startswith("data.") or key in names}


def check_folder(folder: str) -> None:
    """Raises where a pipeline's folder can't be made."""
    if blocked := next((path for path in (Path(folder), *Path(folder).parents) if path.is_file()), None):
        where = "is a file" if blocked == Path(folder) else f"lies below {blocked}, which is a file"
        raise UsageError(f"folder {folder} {where}")


def rl_words(config: str, arguments: Mapping[str, str]) -> list[str]:
    """Returns the arguments of an ``rl`` command."""
    return ["--config", str(configs.find(config)), *(f"--{key}={value}" for key, value in arguments.items())]


def evaluate(config: str, arguments: dict[str, str]) -> dict[str, float]:
    """Returns the metrics of ``rl test`` on held-out records, by name, ``eval/…``."""
    from recipes.cli.lightning_cli import RLCLI

    with contextlib.redirect_stdout(io.StringIO()):
        cli = RLCLI("test", rl_words(config, in_one_process(arguments)))
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return {name: value for name, value in sorted(metrics.items()) if name.startswith("eval/")}


def measured(
    pipeline: Pipeline, name: str, config: str, arguments: dict[str, str], after: Sequence[Path]
) -> dict[str, float]:
    """Runs the stage ``name``, an evaluation by a config with some options, and returns its metrics."""
    settings = {"config": configs.text(config), "arguments": arguments}
    return pipeline.evaluate(name, lambda: evaluate(config, arguments), settings, after)


@dataclass(frozen=True)
class Policy:
    """A policy on the device of its config's Trainer, with the datamodule that encodes its prompts."""

    module: Any
    data: Any
    trainer: Any

    def write(
        self, records: Sequence[dict[str, Any]], seeds: Sequence[int], num_generations: int, **sampling: Any
    ) -> tuple[list[str], list[list[int]], list[bool]]:
        """Writes completions of records' prompts, with the chat template and system prompt of the policy's training."""
        import torch

        prompts = self.data.encoder.prompts([record["prompt"] for record in records], list(records))
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            written = self.module.act(prompts, seeds, num_generations, **sampling)
        ids = [row[:n] for row, n in zip(written.tokens.tolist(), written.length.tolist(), strict=True)]
        return self.module.tokenizer.batch_decode(ids, skip_special_tokens=True), ids, written.finished.tolist()

    def as_read(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns columns of a record from which any datamodule makes the same prompt, messages or text."""
        encoder = self.data.encoder
        prompt = encoder.as_read(record["prompt"])
        if isinstance(prompt, str):
            return {"prompt": prompt}
        variables = {**encoder.chat_template_kwargs, **(record.get("chat_template_kwargs") or {})}
        tools = record.get("tools")
        return {
            "prompt": prompt,
            **({"chat_template_kwargs": variables} if variables else {}),
            **({"tools": tools} if tools else {}),
        }


def load_policy(config: str, arguments: dict[str, str]) -> Policy:
    """Loads the policy of an ``rl`` config, ready to write completions."""
    from lightning.pytorch.plugins.precision import HalfPrecision

    cli = checked("test", rl_words(config, in_one_process(arguments)))
    trainer = cli.trainer
    if isinstance(trainer.precision_plugin, HalfPrecision):
        from rl_modules.language.precision import adopt_precision

        adopt_precision(trainer, cli.model.hparams["lora"] is not None)
    cli.model.configure_model()
    module = trainer.precision_plugin.convert_module(cli.model).to(trainer.strategy.root_device).eval()
    trainer.strategy.connect(module)
    cli.datamodule.trainer = trainer
    return Policy(module, cli.datamodule, trainer)
