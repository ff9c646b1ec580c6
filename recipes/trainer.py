"""The runner of ``rl fit``, and of three lines of Python."""

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes import run, saved_runs, summary
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.progress import TransitionProgressBar
from recipes.signals import Stopped, end_with_starter
from recipes.terminal import quiet, wait_for
from rl_modules.common.errors import UsageError
from rl_modules.ranks import launches


class Trainer(L.Trainer):
    """A Trainer that trains, shows and records a run as ``rl fit`` does, which uses it.

    It trains until the datamodule's ``total_timesteps`` (or ``max_steps``) and shows one progress bar, or lines where
    there is no terminal. Curves and checkpoints go below ``<default_root_dir>/logs/<algorithm>-<task>``. At the end it
    evaluates the final policy and prints a summary, unless ``callbacks`` has a ``ModelCheckpoint``, which takes the
    place of ``Checkpoints``. Ctrl-C writes a checkpoint and ends ``fit``.

    Args:
        threads: CPU threads of torch; 1 is fastest for small networks. None: as they are.
        evaluate: evaluate the final policy after training.
        resume: go on with the newest run of this model on this data (and of ``run_name``, where it is given), as if it
            had never stopped; start one if there is none.
        run_name: name of the run in that of its folder, ``version_<number>_<run_name>``, and so in TensorBoard.
        **arguments: of ``lightning.Trainer``; they override the settings above.

    Raises:
        UsageError: ``resume`` with a logger of your own, whose folders are not known, or with ``fit``'s ``ckpt_path``.
    """

    #: Whether a signal ends the program after the checkpoint, as in this project's own programs; else ``fit`` alone.
    raises_when_stopped = False

    def __init__(
        self,
        threads: int | None = 1,
        evaluate: bool = True,
        resume: bool = False,
        run_name: str | None = None,
        **arguments: Any,
    ) -> None:
        quiet()
        end_with_starter()
        if threads is not None:
            torch.set_num_threads(threads)
        self.evaluates, self.resumes = evaluate, resume
        #: The name of the run in its folder's; None: what was :attr:`changed`, which the command line says.
        self.run_name = run_name
        self.changed = ""
        #: Name of the runs and the earlier run, from the command line; None: those of model, data and ``resume``.
        self.runs_name: str | None = None
        self.resumed: run.SavedRun | None = None
        #: Whether Ctrl-C or SIGTERM ended the last ``fit``.
        self.was_stopped = False
        given = arguments.pop("callbacks", None) or []
        callbacks = list(given) if isinstance(given, list) else [given]
        is_barebones = bool(arguments.get("barebones"))
        if not is_barebones and not any(isinstance(c, Checkpoint) for c in callbacks):
            callbacks.append(Checkpoints())
        own = next((c for c in callbacks if isinstance(c, Checkpoints)), None)
        if own is not None and arguments.get("enable_checkpointing") is False:
            # Lightning refuses any checkpoint callback then, and this one has other tasks too.
            arguments["enable_checkpointing"], own.writes = None, False
        # A trial run and a barebones run leave no curves, as with Lightning's Trainer.
        keeps_curves = not arguments.get("fast_dev_run") and not is_barebones
        self._makes_logger = arguments.get("logger") in (None, True) and keeps_curves
        if resume and not self._makes_logger:
            raise UsageError(
                "resume=True finds the runs of the logger that Trainer makes; leave out logger, "
                "fast_dev_run and barebones, or give fit the checkpoint, ckpt_path"
            )
        shows = arguments.pop("enable_progress_bar", None) is not False
        brings_bar = shows and any(isinstance(c, ProgressBar) for c in callbacks)
        self._shows_bar = shows and not brings_bar and not is_barebones
        defaults = {"max_epochs": -1, "enable_model_summary": False, "enable_progress_bar": brings_bar}
        if self._makes_logger:
            arguments["logger"] = False
        super().__init__(callbacks=callbacks, **{**defaults, **arguments})
        self._given_root_dir = str(self.default_root_dir)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = True,
    ) -> None:
        """Trains, evaluates and prints a summary; the arguments are those of ``lightning.Trainer.fit``."""
        data = train_dataloaders if isinstance(train_dataloaders, L.LightningDataModule) else datamodule
        given_model, model = model, getattr(model, "_orig_mod", model)  # what `torch.compile` returns holds the module
        if self.resumes and ckpt_path is not None:
            raise UsageError(
                f"resume=True finds its checkpoint by itself; leave out ckpt_path={str(ckpt_path)!r}, or resume"
            )
        self.was_stopped = False
        handler = signal.getsignal(signal.SIGINT)
        with ExitStack() as lock:
            lock.callback(wait_for, "")  # a refused run leaves no spinner
            made, found = self._begin(model, data, lock)
            began_s = time.monotonic()
            if (own := getattr(model, "run", None)) is not None:
                own.has_begun = False  # of an earlier fit
            try:
                super().fit(
                    given_model, train_dataloaders, val_dataloaders, datamodule, found or ckpt_path, weights_only
                )
            except (Stopped, SystemExit) as end:
                reason = _reason(end)
                if self.raises_when_stopped or reason is None:
                    raise
                self.was_stopped = True
                print(reason, file=sys.stderr)
                signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C after one
                return
            except Exception:
                if (own := getattr(model, "run", None)) is not None and not own.has_begun:
                    run.remove_unused(made)  # the run was refused
                raise
            if data is not None:
                run.note_end(self, summary.reached(self, model, data)[0])
            if data is not None and self.evaluates and Checkpoints.of(self) is not None:
                wait_for("")
                is_interrupted = summary.finish(self, model, data, time.monotonic() - began_s)
                if is_interrupted and self.raises_when_stopped:
                    raise SystemExit(130)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        """Writes a checkpoint from where a run resumes, or with ``weights_only`` one without the optimizer's state."""
        # Given explicitly, because Lightning otherwise prints its default at each call.
        super().save_checkpoint(filepath, weights_only, storage_options)

    def _begin(self, model: Any, data: Any, lock: ExitStack) -> tuple[list[Path], Path | None]:
        """Prepares folder, logger and bar of this run; returns the folders it made, and the checkpoint it found."""
        name = self.runs_name or type(model).__name__
        if self.runs_name is None and data is not None:
            name = run.run_name(name, data.hparams, type(data).__name__)
        found = None
        if self.resumes:
            self.resumed = None
        if self._makes_logger:
            runs = Path(self._given_root_dir) / run.LOGS
            named = run.plain_name(self.run_name or "")
            newest = saved_runs.newest_run(runs / name, named) if self.resumes else None
            version = None if newest is None else newest.name
            self.loggers = [TensorBoardLogger(runs, name=name, version=version, default_hp_metric=False)]
            if newest is not None:
                found = self._resume(newest, model, data, lock)
        self._default_root_dir = self._given_root_dir
        made, folder = run.begin(self, name, self.resumed)
        if self.resumed is None and folder is not None and self.is_global_zero:
            lock.enter_context(run.held(folder))
        shows = self._shows_bar and self.is_global_zero and data is not None
        has_terminal = sys.stderr.isatty()
        if shows and has_terminal:
            others: list[Any] = [c for c in self.callbacks if not isinstance(c, TransitionProgressBar)]
            self.callbacks: list[Any] = [*others, run.bar_of(data)]
        elif shows:
            run.show_lines(self, data)
        # The bar ends the spinner. A forked rank would have a copy that no thread draws.
        wait_for("preparing the first step" if shows and has_terminal and not launches(self) else "")
        if shows and self.runs_name is None:
            print(f"{name}: starting", file=sys.stderr, flush=True)
        return made, found

    def _resume(self, folder: Path, model: Any, data: Any, lock: ExitStack) -> Path | None:
        """Prepares the folder of an earlier run; returns its newest whole checkpoint."""
        if self.is_global_zero:
            lock.enter_context(run.held(folder))
        path, checkpoint = saved_runs.find(folder, "last"), None
        if path is not None:
            checkpoint, path = saved_runs.read_newest_whole(path)
            saved_runs.require_optimizer(checkpoint, path)
            if self.is_global_zero:
                saved_runs.announce(checkpoint, path, model, data)
        self.resumed = run.SavedRun(folder, path)
        run.continue_folder(self.resumed, checkpoint, self)
        return path


def _reason(end: BaseException) -> str | None:
    """The signal that ended a run, as text; None if it was none."""
    if isinstance(end, Stopped):
        return str(end)
    if isinstance(end, SIGTERMException):
        return "stopped by SIGTERM, without a checkpoint"
    # Lightning answers Ctrl-C with `exit(1)`.
    return "stopped by Ctrl-C, without a checkpoint" if isinstance(end.__context__, KeyboardInterrupt) else None
