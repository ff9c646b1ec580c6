"""Runs a part of a finished run again, from one of its checkpoints, in a temporary folder."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import lightning as L
import yaml

from recipes.callbacks.checkpoints import Checkpoints
from recipes.cli import resume
from recipes.cli.lightning_cli import RLCLI
from rl_modules.common.errors import UsageError
from rl_modules.core.resume import epoch_to_reopen


class StopsWithinEpochs(Protocol):
    """The interface of this project's modules that the recomputation uses."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the last epoch lacks batches."""


class Reached(Exception):
    """The recomputation has reached its target."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run, and where in the run it was written."""

    path: Path
    #: Optimizer steps before it.
    step: int
    #: Batches of all epochs before it, and the epochs begun and finished; equal for checkpoints of the same moment.
    position: tuple[int, int, int]

    @property
    def name(self) -> str:
        """File name without its ending."""
        return self.path.stem


def position_in(loops: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the batches completed, and the epochs started and processed, of a checkpoint's ``loops``."""
    epochs = loops["fit_loop"]["epoch_progress"]["current"]
    batches = loops["fit_loop"]["epoch_loop.batch_progress"]["total"]
    return batches["completed"], epochs["started"], epochs["processed"]


def position_of(trainer: L.Trainer) -> tuple[int, int, int]:
    """Returns the same for a running Trainer, as in a checkpoint written now."""
    loop, module = trainer.fit_loop, cast(StopsWithinEpochs, trainer.lightning_module)
    epochs: Any = loop.epoch_progress.current
    started, processed = epochs.started, epochs.processed
    if module.is_cut_off and (number := epoch_to_reopen(trainer)) is not None:
        started, processed = number, number - 1
    return loop.epoch_loop.batch_progress.total.completed, started, processed


def checkpoints_of(run: Path) -> list[Saved]:
    """Returns a run's checkpoints in the order of the run; files of one moment once.

    ``best.ckpt`` is left out: it is written within an evaluation, not between two batches.
    """
    if not (run / "config.yaml").exists():
        raise UsageError(f"{run} has no config.yaml; give the folder of a run, as logs/PPO-CartPole-v1/version_0")
    found: dict[tuple[int, int, int], Saved] = {}
    for path in sorted((run / "checkpoints").glob("*.ckpt")):
        if path.name in ("best.ckpt", "next.ckpt"):
            continue
        content = resume.read(path)
        saved = Saved(path, content["global_step"], position_in(content["loops"]))
        found[saved.position] = saved
    return sorted(found.values(), key=lambda saved: saved.position)


class Recomputation(RLCLI):
    """``rl fit`` of a recorded config in another folder, without a summary."""

    def __init__(self, args: list[str], callbacks: Sequence[L.Callback], observe: Any) -> None:
        self.own_callbacks, self.observe = list(callbacks), observe
        super().__init__("fit", args)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list) -> Any:
        trainer: Any = super()._instantiate_trainer(config, callbacks)
        trainer.callbacks[:0] = self.own_callbacks
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoints) and self.observe is not None:
                callback.observers.append(self.observe)
        return trainer

    def before_fit(self) -> None:
        self.checkpoint = None  # its tensors are mapped from the file

    def after_fit(self) -> None:
        """Does nothing, because the run has its summary already."""


@contextmanager
def settings(run: Path, start: Saved | None) -> Iterator[tuple[Path, list[str]]]:
    """Yields a temporary folder, and the arguments that run ``run`` again in it from ``start`` or its beginning."""
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    trainer = config["trainer"]
    if trainer.get("num_nodes", 1) != 1 or trainer.get("devices") not in ("auto", 1, "1", [0]):
        raise UsageError(f"{run} had trainer.devices={trainer.get('devices')}; only runs of "
                         "one rank can be recomputed")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rl-") as name:
        folder = Path(name)
        trainer["default_root_dir"] = name
        trainer["logger"] = {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": {"save_dir": name, "name": "again", "version": 0, "default_hp_metric": False},
        }
        trainer["enable_progress_bar"] = False
        config["checkpoint"] = {**config["checkpoint"], "interval_s": 1e9, "keep_previous": False, "keep_all": False}
        config.update(ckpt_path=None if start is None else str(start.path), resume=False, record_every=0)
        (folder / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
        yield folder, ["--config", str(folder / "config.yaml")]
