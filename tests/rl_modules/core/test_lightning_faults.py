"""Faults of Lightning that :mod:`rl_modules.core.resume` corrects, each shown by a plain LightningModule.

A test that fails here says that Lightning has mended the fault: the correction of the test's name can go.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCHES = 4


class Line(L.LightningModule):
    """One weight; notes epoch and number of each batch, and the epochs of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[tuple[int, int]] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_idx))
        return (self.weight * batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.evaluated.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class At(L.Callback):
    """Does something at the end of a batch, or of an epoch where ``batch`` is None."""

    def __init__(self, batch: int | None, act: Callable[[L.Trainer], Any]) -> None:
        self.batch, self.act = batch, act

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] == self.batch and trainer.current_epoch == 0:
            self.act(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.batch is None and trainer.current_epoch == 0:
            self.act(trainer)


def fit(
    module: Line, callback: L.Callback | None = None, ckpt: Path | None = None, evaluates: bool = True, **options: Any
) -> L.Trainer:
    data = DataLoader(torch.ones(BATCHES), batch_size=1)
    options = {"max_epochs": 2, **({} if evaluates else {"limit_val_batches": 0}), **options}
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[callback] if callback else [], **options)  # fmt: skip
    trainer.fit(module, data, data, ckpt_path=ckpt)
    return trainer


def saved(folder: Path, batch: int | None, **options: Any) -> Path:
    """The checkpoint of a run at the end of a batch or epoch."""
    path = folder / "last.ckpt"
    fit(Line(), At(batch, lambda trainer: trainer.save_checkpoint(path)), **options)
    return path


def test_count_step() -> None:
    class Manual(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            self.weight.data.sub_(0.1)  # an update without an optimizer of Lightning's

    module = Manual()
    module.automatic_optimization = False
    assert fit(module, max_epochs=1).global_step == 0


def test_uncount_step() -> None:
    class Skips(Line):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            closure()  # and no step of the optimizer

    assert fit(Skips(), max_epochs=1).global_step == BATCHES


def test_accumulated_gradients(tmp_path: Path) -> None:
    whole, resumed = Line(), Line()
    fit(whole, accumulate_grad_batches=2)
    fit(resumed, ckpt=saved(tmp_path, 0, accumulate_grad_batches=2), accumulate_grad_batches=2)
    assert resumed.weight.item() - whole.weight.item() == pytest.approx(0.1 / 2)  # the first batch's half of a step


def test_reopen_epoch(tmp_path: Path) -> None:
    path, resumed = tmp_path / "last.ckpt", Line()
    fit(Line(), At(1, lambda trainer: setattr(trainer, "should_stop", True))).save_checkpoint(path)
    fit(resumed, ckpt=path)
    assert resumed.seen[0] == (1, 0)  # not (0, 2)


def test_finish_batch(tmp_path: Path) -> None:
    resumed = Line()
    fit(resumed, ckpt=saved(tmp_path, BATCHES - 1))
    assert resumed.evaluated == [1] * BATCHES  # epoch 0 was saved before its evaluation


def test_begin_next_epoch(tmp_path: Path) -> None:
    resumed, steps = Line(), {"max_steps": 2 * BATCHES, "max_epochs": -1}
    path = saved(tmp_path, None, evaluates=False, **steps)
    fit(resumed, ckpt=path, evaluates=False, **steps)
    assert resumed.seen[0] == (0, BATCHES)  # a fifth batch of four
    trainer = fit(Line(), ckpt=saved(tmp_path, None, **steps), **steps)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 2 * BATCHES + 1  # the last batch has ended twice
