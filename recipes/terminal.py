"""The process of a command: its texts and its end, the libraries' messages, the user's modules and their errors."""

import errno
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from recipes.signals import Stopped
from rl_modules.common.errors import UsageError
from rl_modules.common.extras import PACKAGES, install

#: Warnings that do not concern the person at the terminal, as regular expressions.
_HIDDEN = (
    ".*LightningCLI's args parameter is intended.*",  # sys.argv stays, because Lightning starts other ranks with it
    ".*is deprecated, use `isinstance.treespec, TreeSpec.*",  # Lightning calls torch by an old name
    ".*smaller than the logging interval.*",  # metrics are written once per epoch, not every n steps
    ".*does not have many workers.*",
    ".*Total length of .* across ranks is zero.*",  # evaluation is off
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*Experiment logs directory .* exists and is not empty.*",  # a CSVLogger's, of this run's own config
    ".*treespec.*",
    ".*callbacks used to create the checkpoint need to be provided.*",  # evaluation writes no checkpoints
    ".*Couldn't infer the batch indices.*",
    "Found .* module.s. in eval mode at the start of training.*",  # reference and reward model, on purpose
    ".*recommended to use .self.log.*sync_dist=True.*",  # what is logged so is the same on all ranks
    ".*torch.distributed.nn.functional.all_gather is deprecated.*",  # Lightning calls it
    ".*but have no logger configured.*",  # `test` after `fit` reports in the summary
)


class ToStandardError(logging.StreamHandler):
    """Writes to the standard error of the moment, which a notebook may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # `setStream` flushes the former one, which may be closed
        super().emit(record)


def quiet() -> None:
    """Hides the libraries' messages that are not for the person at the terminal, and shows the datamodules' own."""
    replace_unknown_characters()
    if not (ours := logging.getLogger("datamodules")).handlers:
        ours.addHandler(ToStandardError())
        ours.setLevel(logging.INFO)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The report of a requested profiler, and the reason for which EarlyStopping with `verbose` ended a run.
    for name in ("lightning.pytorch.profilers", "lightning.pytorch.callbacks.early_stopping"):
        logging.getLogger(name).setLevel(logging.INFO)
    for message in _HIDDEN:
        warnings.filterwarnings("ignore", message)


def replace_unknown_characters() -> None:
    """Prints "?" for what standard output's encoding lacks, such as "±" or "…", where Python would raise."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


_spinner: Any = None


def wait_for(what: str) -> None:
    """Shows what is being done beside a spinner, where standard error is a terminal; "" ends it."""
    global _spinner
    if _spinner is not None and not what:
        _spinner.stop()
        _spinner = None
    elif what and sys.stderr.isatty() and is_first_rank():
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        if _spinner is None:
            # What is printed meanwhile comes above it. A file keeps what is printed to it.
            _spinner = Live(console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
            _spinner.start()
        _spinner.update(Spinner("dots", what))


def show(text: str) -> None:
    """Prints a text. A closed pipe, as in ``rl list | head``, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_ROOT = Path(__file__).resolve().parents[2]


def add_working_directory() -> None:
    """Makes the working directory's modules importable, after all installed."""
    folder = Path(os.getcwd())
    if folder.resolve() == _ROOT:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        return
    # `python -m` puts the working directory first, where a folder `datamodules` would replace the project's package.
    sys.path[:] = [path for path in sys.path if path not in ("", str(folder))]
    sys.path.append(str(folder))


def is_first_rank() -> bool:
    """Whether this process is the first rank, before there is a Trainer."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0


#: What gloo and NCCL say to a rank when another one is gone.
_OF_OTHER_RANKS = re.compile(
    r"Connection (closed|reset) by peer|gloo.*(closed|timed out|Broken pipe)|NCCL.*remote|Broken pipe.*gloo", re.I
)


@contextmanager
def one_sentence(resume_command: Callable[[Stopped], str] | None = None) -> Iterator[None]:
    """Turns what ends a program, an error or a signal, into a sentence and an exit code.

    Args:
        resume_command: the command that resumes a stopped run.
    """
    replace_unknown_characters()
    try:
        yield
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except Stopped as stopped:
        if is_first_rank():
            how = "" if resume_command is None else f"; resume with\n  {resume_command(stopped)}"
            print(f"{stopped}{how}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SystemExit as exit_:
        # Without a checkpoint, Lightning exits with 1 after Ctrl-C, like after an error, and with 0 after SIGTERM, like
        # after a success.
        if isinstance(exit_.__context__, KeyboardInterrupt):
            raise SystemExit(130) from None
        lightning = sys.modules.get("lightning.pytorch.utilities.exceptions")  # help does without the library
        if lightning is not None and isinstance(exit_, lightning.SIGTERMException):
            print("stopped by SIGTERM, without a checkpoint", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full and is_of_users_code(error):
            raise
        remedy = "; the checkpoints written so far are whole: free some space, then resume" if is_full else ""
        print(f"error: {error}{remedy}", file=sys.stderr)
        raise SystemExit(1) from error
    except Exception as error:
        if (said := _of_the_machine(error)) is not None:
            print(f"error: {said}", file=sys.stderr)
            raise SystemExit(1) from error
        if not is_of_a_library(error):
            raise
        extra = next(
            (
                extra
                for extra, packages in PACKAGES.items()
                if isinstance(error, ModuleNotFoundError)
                and any(package.startswith(f"{error.name}>") for package in packages)
            ),
            None,
        )
        remedy = "" if extra is None else f": {install(extra)}"
        print(f"error: {' '.join(str(error).split())[:600]}{remedy}", file=sys.stderr)
        raise SystemExit(1) from error


def _of_the_machine(error: Exception) -> str | None:
    """What a lack of memory, or another rank's end, means for the user; None: the error is neither."""
    said = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in said):
        return f"the memory does not suffice: {said}; lower data.n_envs, data.n_steps, data.buffer_size or batch_size"
    if isinstance(error, RuntimeError) and _OF_OTHER_RANKS.search(said):
        return (
            "another rank of this run has ended, so this one ends too: what ended it stands in its own output; "
            "resume with --resume once that is mended"
        )
    return None


def is_of_a_library(error: BaseException) -> bool:
    """Whether a library raised an error for the user, as for a missing package, or torch for weights that don't fit."""
    if is_of_users_code(error):
        return False
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    raised_in = str(last.f_globals.get("__name__"))
    if isinstance(error, ModuleNotFoundError) or (
        isinstance(error, RuntimeError) and raised_in == "torch.nn.modules.module"
    ):
        return True
    return any(
        name.startswith(("lightning.", "jsonargparse.", "wandb.", "gymnasium.error"))
        for name in (type(error).__module__, raised_in)
    )


def is_of_users_code(error: BaseException) -> bool:
    """Whether an error passed a line of neither a library nor this project, which its traceback names."""
    known = {"rl_modules", "datamodules", "recipes", *sys.stdlib_module_names}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package, file = str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename
        is_library = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
        if not (package in known or is_library or file.startswith("<")):
            return True
    return False
