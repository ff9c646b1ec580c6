"""Lightning's Trainer with the settings of ``rl fit``, for three lines of Python."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes import run, summary
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.progress import TransitionProgressBar
from recipes.cli.terminal import quiet
from recipes.signals import Stopped, end_with_starter


class Trainer(L.Trainer):
    """A Trainer that trains, shows and records a run as ``rl fit`` does.

    It trains until the datamodule's ``total_timesteps`` (or ``max_steps``) and shows one progress bar, or lines where
    there is no terminal. Curves and checkpoints go below ``<default_root_dir>/logs/<algorithm>-<task>``. At the end it
    evaluates the final policy and prints a summary, unless ``enable_checkpointing`` is false or ``callbacks`` has a
    ``ModelCheckpoint``, which takes the place of ``Checkpoints``. Ctrl-C writes a checkpoint and ends ``fit``.

    Args:
        threads: CPU threads of torch; 1 is fastest for small networks. None: as they are.
        evaluate: evaluate the final policy after training.
        **arguments: of ``lightning.Trainer``; they override the settings above.
    """

    #: Whether a signal ends the program after the checkpoint, as in this project's own programs; else ``fit`` alone.
    raises_when_stopped = False

    def __init__(self, threads: int | None = 1, evaluate: bool = True, **arguments: Any) -> None:
        quiet()
        end_with_starter()
        if threads is not None:
            torch.set_num_threads(threads)
        self.evaluates = evaluate
        #: Whether Ctrl-C or SIGTERM ended the last ``fit``.
        self.was_stopped = False
        given = arguments.pop("callbacks", None) or []
        callbacks = list(given) if isinstance(given, list) else [given]
        is_barebones = bool(arguments.get("barebones"))
        writes = arguments.get("enable_checkpointing") is not False and not is_barebones
        if writes and not any(isinstance(c, Checkpoint) for c in callbacks):
            callbacks.append(Checkpoints())
        # A trial run and a barebones run leave no curves, as with Lightning's Trainer.
        keeps_curves = not arguments.get("fast_dev_run") and not is_barebones
        self._makes_logger = arguments.get("logger") in (None, True) and keeps_curves
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
        started_s = time.monotonic()
        self.was_stopped = False
        self._prepare(model, data)
        handler = signal.getsignal(signal.SIGINT)
        try:
            super().fit(given_model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
        except Stopped as stopped:
            if self.raises_when_stopped:
                raise
            self.was_stopped = True
            print(stopped, file=sys.stderr)
        except SIGTERMException:
            self.was_stopped = True
            print("stopped by SIGTERM, without a checkpoint", file=sys.stderr)
        except SystemExit as exit_:
            # Lightning answers Ctrl-C with `exit(1)`.
            if not isinstance(exit_.__context__, KeyboardInterrupt):
                raise
            self.was_stopped = True
            print("stopped by Ctrl-C, without a checkpoint", file=sys.stderr)
            # Lightning ignores Ctrl-C from then on.
            signal.signal(signal.SIGINT, handler)
        if not self.was_stopped and data is not None and self.evaluates and Checkpoints.of(self) is not None:
            summary.finish(self, model, data, time.monotonic() - started_s)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        """Writes a checkpoint from where a run resumes, or with ``weights_only`` one without the optimizer's state."""
        # Given explicitly, because Lightning otherwise prints its default at each call.
        super().save_checkpoint(filepath, weights_only, storage_options)

    def _prepare(self, model: Any, data: Any) -> None:
        """Adds the logger and the progress bar of this run."""
        name = (
            run.run_name(type(model).__name__, data.hparams, type(data).__name__)
            if data is not None
            else type(model).__name__
        )
        if self._makes_logger:
            folder = Path(self.default_root_dir) / run.LOGS
            self.loggers = [TensorBoardLogger(folder, name=name, default_hp_metric=False)]
        self._default_root_dir = self._given_root_dir
        run.begin(self, name)
        if not self._shows_bar or not self.is_global_zero or data is None:
            return
        if sys.stderr.isatty():
            others: list[Any] = [c for c in self.callbacks if not isinstance(c, TransitionProgressBar)]
            self.callbacks: list[Any] = [*others, run.bar_of(data)]
        else:
            run.show_lines(self, data)
        print(f"{name}: starting", file=sys.stderr, flush=True)
