"""Callbacks that stop a run: where its loss or gradient is NaN or infinite, and where it has reached a mean return."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from rl_modules.algorithm import Algorithm
from rl_modules.common.errors import UsageError


class FiniteCheck(Callback):
    """Checks the loss and the gradient's norm of every batch, and the weights before a checkpoint is written.

    The gradient's norm is checked where the algorithm clips, or where another module sets ``grad_norm``. On an
    accelerator a batch is checked after the next one, so that the device is never waited for. The batch of a bad step
    is written to ``bad_batch.pt`` in the folder of the checkpoints.

    ``rl fit`` checks every run. In Python: ``Trainer(callbacks=[FiniteCheck()])``.

    Raises:
        UsageError: the loss, the norm or a parameter is NaN or infinite; names the step and the files.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, int, Any, Tensor, Tensor | None] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pending = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            return
        # In half precision gradients overflow occasionally, and the loss scaler skips those steps.
        owner = pl_module.run if isinstance(pl_module, Algorithm) else pl_module
        norm = None if trainer.precision == "16-mixed" else getattr(owner, "grad_norm", None)
        step = (trainer.global_step, trainer.current_epoch, batch, loss, norm)
        if loss.device.type == "cpu":
            _check_step(trainer, *step)
        else:
            self._check_pending(trainer)
            self._pending = step

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check_pending(trainer)
        for name, parameter in pl_module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise UsageError(
                    f"after step {trainer.global_step} the parameter {name} is NaN or infinite; no "
                    f"checkpoint was written since, {_last_good(trainer)}"
                )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check_pending(trainer)

    def _check_pending(self, trainer: L.Trainer) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            _check_step(trainer, *pending)


def _check_step(trainer: L.Trainer, step: int, epoch: int, batch: Any, loss: Tensor, norm: Tensor | None) -> None:
    name, value = "loss", loss.item()
    if math.isfinite(value):
        if norm is None or math.isfinite(norm.item()):
            return
        name, value = "gradient's norm", norm.item()
    suffix = f"_rank{trainer.global_rank}" if trainer.world_size > 1 else ""
    file = _folder(trainer) / f"bad_batch{suffix}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"batch": plain_batch(batch), "step": step, "epoch": epoch, "what": name, "value": value}, file)
    raise UsageError(
        f"the {name} of optimizer step {step} (epoch {epoch}) is {value}; training stopped, its batch "
        f"is in {file}, {_last_good(trainer)}"
    )


def _folder(trainer: L.Trainer) -> Path:
    """Returns the checkpoints' folder; without checkpoints the Trainer's ``default_root_dir``."""
    return Path(getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir)


def _last_good(trainer: L.Trainer) -> str:
    last = _folder(trainer) / "last.ckpt"
    written = [last] if last.exists() else sorted(last.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return f"the last good checkpoint is {written[-1]}" if written else "no checkpoint had been written before"


def plain_batch(batch: Any, copy: bool = False) -> Any:
    """Returns a batch as data that ``torch.load(..., weights_only=True)`` accepts; other objects become their repr."""
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=copy)
    if isinstance(batch, dict):
        return {key: plain_batch(value, copy) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain_batch(value, copy) for value in batch]
    return batch if batch is None or isinstance(batch, bool | int | float | str) else repr(batch)


class StopTrainingOnRewardThreshold(L.Callback):
    """Ends training once ``eval/mean_reward`` is at least ``reward_threshold``, as Stable-Baselines3's class does.

    Lightning's ``EarlyStopping(stopping_threshold=500)`` needs more than 500, which CartPole-v1 does not give.

    Args:
        reward_threshold: mean return of an evaluation, in units of reward.
        verbose: 1 prints a line when training ends; 0 does not.

    Raises:
        UsageError: when a ``fit`` starts that evaluates nothing in training.
    """

    def __init__(self, reward_threshold: float, verbose: int = 1) -> None:
        self.reward_threshold, self.verbose = reward_threshold, verbose

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if getattr(data, "eval_freq", None) == 0 or not hasattr(data, "eval_freq"):
            raise UsageError(
                "StopTrainingOnRewardThreshold reads evaluations in training, and there are none: set "
                "data.eval_freq, in transitions"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mean = trainer.callback_metrics.get("eval/mean_reward")
        if mean is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        reached = trainer.strategy.reduce_boolean_decision(bool(mean >= self.reward_threshold), all=False)
        if reached and self.verbose and trainer.is_global_zero:
            print(f"the mean return {float(mean):g} reached reward_threshold={self.reward_threshold:g}: training ends")
        trainer.should_stop = trainer.should_stop or reached
