"""``rl replay``: rebuilds one update of a finished run."""

import code
import contextlib
from pathlib import Path
from typing import Any

import lightning as L
import torch

from recipes.callbacks.finite_check import plain_batch
from recipes.cli.recomputation import Reached, Recomputation, checkpoints_of, settings
from rl_modules.common.errors import UsageError


class UpdateRecorder(L.Callback):
    """Records the batches, losses and gradient norms of one update, then ends the run."""

    def __init__(self, step: int, interactive: bool = False) -> None:
        self.step, self.interactive = step, interactive
        self.update: dict[str, Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._batches: list[Any] = []
        self._losses: list[torch.Tensor | None] = []
        self._norms: list[torch.Tensor] = []
        self._norm_of: dict[str, torch.Tensor] = {}
        self._weights: dict[str, Any] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *others: Any) -> None:
        self._before = trainer.global_step
        self._given = batch
        self._batches.append(plain_batch(batch, copy=True))
        if self.interactive and self._weights is None:
            self._weights = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Takes the norms of the gradients, which are not clipped yet."""
        norms = {name: parameter.grad.detach().float().norm() for name, parameter in pl_module.named_parameters()
                 if parameter.grad is not None}  # fmt: skip
        if norms:
            self._norm_of = norms
            self._norms.append(torch.stack(list(norms.values())).norm())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *others: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._losses.append(loss.detach().cpu().clone() if isinstance(loss, torch.Tensor) else None)
        if trainer.global_step < self.step:
            if trainer.global_step > self._before:
                self._begin()
            return
        self.update = {
            "algorithm": type(pl_module).__name__,
            "step": self.step,
            "epoch": trainer.current_epoch,
            "batches": self._batches,
            # The whole update's loss: Lightning divides each micro-batch's by their number.
            "loss": sum(loss for loss in self._losses if loss is not None) if any(
                loss is not None for loss in self._losses) else None,
            "losses": self._losses,
            "grad_norm": self._norms[0].cpu() if self._norms else None,
            "grad_norms": {name: norm.cpu() for name, norm in self._norm_of.items()},
        }  # fmt: skip
        if self.interactive:
            self._open_console(trainer, pl_module)
        raise Reached

    def _open_console(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._weights is not None
        pl_module.load_state_dict(self._weights)
        variables = {
            "update": self.update,
            "batch": self._given,
            "model": pl_module,
            "data": trainer.datamodule,  # type: ignore[attr-defined]
            "trainer": trainer,
            "torch": torch,
        }
        code.interact(f"update {self.step}: {', '.join(variables)}; `model` has the weights from before the update",
                      local=variables, exitmsg="")  # fmt: skip


def replay(run: Path, step: int, output: Path, interactive: bool = False) -> dict[str, Any]:
    """Rebuilds one update of a run and writes it to a file."""
    if step < 1:
        raise UsageError(f"step={step} must be at least 1: updates are counted from 1")
    saved = checkpoints_of(run)
    if saved and step > saved[-1].step:
        raise UsageError(f"step={step} is after the run's last checkpoint, {saved[-1].path}, which has "
                         f"{saved[-1].step} updates")  # fmt: skip
    start = max((one for one in saved if one.step < step), key=lambda one: one.position, default=None)
    recorder = UpdateRecorder(step, interactive)
    with settings(run, start) as (_, arguments):
        print(
            f"update {step} of {run}, from {'its beginning' if start is None else f'{start.name}.ckpt, {start.step}'}"
        )
        with contextlib.suppress(Reached):
            Recomputation(arguments, [recorder], None)
    if recorder.update is None:
        raise UsageError(f"{run} has no update {step}: recomputed, it ended before")
    output.parent.mkdir(parents=True, exist_ok=True)
    torch.save(recorder.update, output)
    return recorder.update
