"""Stops a run whose loss or gradient is no number, before it gets into a checkpoint."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rl_modules.common.errors import UsageError


class FiniteCheck:
    """Looks at the loss of every batch, and at the norm of its gradient where the module leaves that in ``grad_norm``.

    On an accelerator a batch is judged when the next is over, so that the device is never waited for.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, int, Any, Tensor, Tensor | None] | None = None

    def after_batch(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, folder: Path) -> None:
        """Judge a batch, or the one before.

        Raises:
            UsageError: the loss or the gradient's norm is NaN or infinite; names the step, and where the batch is.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            return
        # In half precision gradients overflow now and then, and the loss scaler passes over them.
        norm = None if trainer.precision == "16-mixed" else getattr(module, "grad_norm", None)
        now = (trainer.global_step, trainer.current_epoch, batch, loss, norm)
        if loss.device.type == "cpu":
            self._judge(trainer, now, folder)
        else:
            self.judge_pending(trainer, folder)
            self._pending = now

    def judge_pending(self, trainer: L.Trainer, folder: Path) -> None:
        """Judge what has not been yet; called before a checkpoint is written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._judge(trainer, pending, folder)

    def before_saving(self, trainer: L.Trainer, folder: Path) -> None:
        """Refuse to save weights that are no numbers.

        Raises:
            UsageError: names the first such parameter.
        """
        self.judge_pending(trainer, folder)
        for name, parameter in trainer.lightning_module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise UsageError(f"after step {trainer.global_step} the parameter {name} is NaN or infinite; nothing "
                                 f"was saved since, {_last_good(folder)}")  # fmt: skip

    @staticmethod
    def _judge(trainer: L.Trainer, judged: tuple, folder: Path) -> None:
        step, epoch, batch, loss, norm = judged
        what, value = "loss", loss.item()
        if math.isfinite(value):
            if norm is None or math.isfinite(norm.item()):
                return
            what, value = "gradient's norm", norm.item()
        suffix = f"_rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        file = folder / f"bad_batch{suffix}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"batch": _plain(batch), "step": step, "epoch": epoch, "what": what, "value": value}, file)
        raise UsageError(f"the {what} of optimizer step {step} (epoch {epoch}) is {value}; training stopped, its batch "
                         f"is in {file}, {_last_good(folder)}")  # fmt: skip


def _plain(batch: Any) -> Any:
    """A batch as ``torch.load(..., weights_only=True)`` gives it back; what that would refuse is described in words."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu()
    if isinstance(batch, dict):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_plain(value) for value in batch]
    return batch if batch is None or isinstance(batch, bool | int | float | str) else repr(batch)


def _last_good(folder: Path) -> str:
    last = folder / "last.ckpt"
    return f"the last good checkpoint is {last}" if last.exists() else "no checkpoint had been written before"
