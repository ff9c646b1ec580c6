"""The argument parser of ``rl``."""

import re
from typing import Any, ClassVar

import torch
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser

from recipes.callbacks.checkpoints import Checkpoints
from recipes.cli.sentences import one_sentence
from rl_modules.common.errors import UsageError

# A default of StochasticWeightAveraging's; the recorded config holds its name.
register_type(torch.device)


class ParserError(UsageError):
    """A parser's own error, as a sentence. Parsers of classes are nested: the outer one adds the group."""

    def __init__(self, text: str, group: str, chosen: dict[str, type], checkpoint: str | None = None) -> None:
        super().__init__(one_sentence(text, chosen, group, checkpoint))
        self.text, self.group = text, group


class RLParser(LightningArgumentParser):
    """Lightning's parser with errors in one sentence, which offers the nearest known name."""

    #: The run's classes, ``model`` and ``data``, whose options a misspelled one is compared with.
    chosen: ClassVar[dict[str, type]] = {}
    #: Value of ``--ckpt_path``.
    checkpoint: ClassVar[str | None] = None

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raises the parser's message as a UsageError; an error of a class's own is raised as it is."""
        inner: ParserError | None = None
        cause: BaseException | None = ex
        while cause is not None:
            if isinstance(cause, UsageError) and not isinstance(cause, ParserError):
                raise cause
            inner = cause if isinstance(cause, ParserError) else inner
            cause = cause.__cause__ or cause.__context__
        found = re.search(r'Parser key "(?:\w+\.)*?(model|data|trainer|checkpoint)\b', message)
        group = found.group(1) if found else inner.group if inner else ""
        raise ParserError(inner.text if inner else message, group, self.chosen, self.checkpoint) from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Argparse's help, with the names of classes in place of their representations."""
        return re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", super().format_help(*args, **kwargs))


def add_arguments(parser: LightningArgumentParser, command: str, records: bool) -> None:
    """Adds the arguments of ``rl`` to those of Lightning's CLI."""
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
