"""The argument parser, and the classes that its short names mean."""

import re
from importlib import import_module
from inspect import signature
from pathlib import Path

from lightning.pytorch.cli import LightningArgumentParser

import datamodules
import rl_modules
from recipes.callbacks.checkpoints import Checkpoints
from recipes.cli.sentences import one_sentence
from rl_modules.common.errors import UsageError


class RLParser(LightningArgumentParser):
    """Lightning's parser with errors in one sentence, which offers the nearest known name."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raises the parser's message as a UsageError."""
        argument = getattr(ex, "argument_name", None)
        raise UsageError(f"{argument}: {one_sentence(message)}" if argument else one_sentence(message)) from ex


def add_arguments(parser: LightningArgumentParser, command: str, records: bool) -> None:
    """Adds the arguments of ``rl`` to those of Lightning's CLI.

    Args:
        parser: of the command.
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        records: whether the command is ``record``, which is parsed as ``predict``.
    """
    if records:
        parser.add_argument("--output", type=str, default="videos", help="Folder of the videos.")
        parser.add_argument("--episodes", type=int, default=1, help="Number of episodes to record.")
    elif command == "predict":
        parser.add_argument(
            "--output", type=str, default=None,
            help="File, .csv or .jsonl; default: episodes.csv, for a language model completions.csv.",
        )  # fmt: skip
    if command == "fit":
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.add_argument(
            "--resume", action="store_true",
            help="Resume the newest run of this model on this data; start one if there is none.",
        )  # fmt: skip
        parser.add_argument(
            "--record_every", type=int, default=0, help="Transitions between two recorded episodes; 0: none."
        )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch; 1 is fastest for small networks.")


def import_named(args: list[str]) -> None:
    """Imports the classes that the arguments or their config files name.

    The parser finds short names (``--model PPO``) among the imported classes, and the help lists all of them. The other
    classes are not imported, so that a control task imports no language model.

    Raises:
        UsageError: a class needs a package that is not installed.
    """
    files = [Path(arg.rpartition("=")[2]) for arg in args]
    texts = [file.read_text("utf-8") for file in files if file.suffix in (".yaml", ".yml", ".json") and file.is_file()]
    words = set(re.findall(r"\w+", " ".join([*args, *texts])))
    for package in (rl_modules, datamodules):
        for name in package.__all__:
            if name in words or not {"-h", "--help"}.isdisjoint(args):
                try:
                    getattr(package, name)
                except ModuleNotFoundError as error:
                    if name in words:
                        raise UsageError(f"{name} needs {error.name}, which is not installed: pip install "
                                         "'lightning-rl-recipes[language]'") from error  # fmt: skip


def accepts(class_path: str, name: str) -> bool:
    """Whether a class or one of its bases takes an argument of that name."""
    module, _, class_name = class_path.rpartition(".")
    bases = getattr(import_module(module), class_name).__mro__
    return any(name in signature(base.__init__).parameters for base in bases if "__init__" in vars(base))
