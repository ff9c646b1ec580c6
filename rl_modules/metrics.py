"""Metrics by name: accumulated on the device, written once per epoch over the transitions axis."""

from typing import Any, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules.common.contract import Experience, ExperienceSource
from rl_modules.common.errors import UsageError
from rl_modules.core.curves import Curves
from rl_modules.core.resume import draw_over, is_cut_off
from rl_modules.metric_sums import MetricSums
from rl_modules.ranks import episodes_of_all_ranks, is_alone

#: Prefix of the names of logged values. A logged value replaces one that the algorithm records under the same name.
LOGGED = "log:"
#: Reductions that ``log`` takes, by what Lightning accepts.
REDUCE_FX: dict[Any, str] = {
    "mean": "mean", torch.mean: "mean", "max": "max", torch.max: "max", "min": "min", torch.min: "min", "sum": "sum",
    torch.sum: "sum",
}  # fmt: skip


@_disable_dynamo
def _log_outside_of_graphs(module: "MetricsMixin", *arguments: Any) -> None:
    """Logs outside of compiled graphs: Lightning inspects signatures and stores values by name, which Dynamo can't
    trace.
    """
    module._log_value(*arguments)


class MetricsMixin(Curves):
    """``record``, ``record_now`` and ``log`` of the control algorithms, whose curves are drawn over transitions."""

    experience: Experience

    log_every: int

    def __init__(self) -> None:
        super().__init__()
        #: Whether this epoch's diagnostics are written. They cost kernels, so others are not computed.
        self.logs_this_epoch = True
        self._sums = MetricSums()
        self._latest: dict[str, float] = {}
        # Objects of torchmetrics that were logged in this epoch.
        self._objects: dict[str, Any] = {}
        #: Global norm of the last gradient before it was clipped; None where nothing is clipped.
        self.grad_norm: Tensor | None = None
        # What `write_metrics` takes at this epoch's end; None: nothing is due.
        self._point: tuple[dict[str, float], int] | None = None

    def record(self, **metrics: Tensor | float) -> None:
        """Adds scalars of one minibatch; their mean over the epoch is logged as ``train/<name>``.

        Any number of names, in any subset of the updates. Does nothing in epochs that are not logged, nor in
        evaluations, which call ``act`` too.
        """
        evaluates = self._trainer is not None and self._trainer.evaluating
        if self.logs_this_epoch and not evaluates:
            self._sums.add({f"train/{name}": value for name, value in metrics.items()})

    def record_now(self, **metrics: float) -> None:
        """Sets numbers that hold once per epoch, such as a coefficient; the last value is logged."""
        self._latest.update({f"train/{name}": value for name, value in metrics.items()})

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:  # type: ignore[override]
        """Lightning's ``log``. In training the epoch's mean is drawn over ``total_timesteps``, like every curve; by
        ``reduce_fx`` its sum, largest or smallest value.

        Args:
            name: of the curve.
            value: a number, a scalar tensor, or an object of torchmetrics.
            prog_bar: show it in Lightning's progress bar.
            logger: False: known to callbacks, but not drawn.
            **options: Lightning's others.
        """
        if torch.compiler.is_compiling():
            _log_outside_of_graphs(self, name, value, prog_bar, logger, options)
        else:
            self._log_value(name, value, prog_bar, logger, options)

    def _log_value(self, name: str, value: Any, prog_bar: bool, logger: bool | None, options: dict[str, Any]) -> None:
        trainer = self._trainer
        value = value.item() if isinstance(value, np.generic) else value
        reduction = REDUCE_FX.get(options.get("reduce_fx", "mean"))
        if trainer is not None and trainer.training and reduction is not None:
            if logger is not False and self.logs_this_epoch:
                self._draw(name, value, reduction)
            logger = False
            options["on_step"], options["on_epoch"] = False, True
        super().log(name, value, prog_bar=prog_bar, logger=logger, **options)

    def _draw(self, name: str, value: Any, reduction: str) -> None:
        """Adds a logged value to the next point of its curve."""
        if not isinstance(value, Tensor | int | float):
            self._objects[name] = value
        elif reduction == "mean":
            self._sums.add({LOGGED + name: value})
        else:
            self._sums.reduce(LOGGED + name, value, reduction)

    @property
    def source(self) -> ExperienceSource:
        """The datamodule of the run.

        Raises:
            UsageError: the Trainer was given none.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None:
            wanted = "ReplayDataModule" if self.experience.kind == "replay" else "RolloutDataModule"
            raise UsageError(f"{type(self).__name__} learns from a datamodule: give the Trainer's fit "
                             f"datamodule={wanted}(...)")  # fmt: skip
        return cast(ExperienceSource, datamodule)

    @property
    def _place(self) -> int:
        return self.source.num_timesteps

    @property
    def is_cut_off(self) -> bool:
        """Whether a resumed run has batches left in the last epoch; a run that reached ``total_timesteps`` has none."""
        return is_cut_off(self.trainer) and not self.source.is_complete

    # ---------------------------------------------------------------- curves

    def write_metrics(self, rollout: dict[str, float], step: int) -> None:
        """Writes one point of every training curve and begins the next.

        Args:
            rollout: the datamodule's metrics.
            step: transitions so far.
        """
        metrics = {**rollout, **self._latest, **self.means_so_far()}
        self._write_point(metrics, step)
        self._hand_to_callbacks({name: value for name, value in metrics.items() if not name.startswith("time/")})
        self._sums.clear()
        self._latest, self._objects = {}, {}

    def means_so_far(self) -> dict[str, float]:
        """Means since the last point of the curves, over all ranks, which call this together. A logged value replaces a
        recorded one of the same name.
        """
        means = self._sums.means(None if is_alone(self.trainer) else self.trainer.strategy)
        logged = {name.removeprefix(LOGGED): x for name, x in means.items() if name.startswith(LOGGED)}
        logged |= {name: float(metric.compute()) for name, metric in self._objects.items()}
        recorded = {name: x for name, x in means.items() if not name.startswith(LOGGED)}
        return {**recorded, **logged}

    def _on_validation_start(self) -> None:
        if not self.is_fitting:
            return
        # Lightning draws over this count what a subclass or a callback logs in an evaluation.
        draw_over(self.trainer, self.source.num_timesteps)
        # An evaluation comes before the epoch's end: its callbacks monitor the means so far, also after a resume.
        self._hand_to_callbacks(self.means_so_far())

    def _on_train_epoch_start(self) -> None:
        self.logs_this_epoch = (self.current_epoch + 1) % self.log_every == 0

    def _on_train_epoch_end(self) -> None:
        self._point = None
        self.require_finite_weights()
        source = self.source
        # What Lightning and its callbacks log by themselves is drawn over this count: here, over transitions.
        draw_over(self.trainer, source.num_timesteps)
        rollout = source.metrics_over_ranks()
        # For Lightning's bar, EarlyStopping and ModelCheckpoint, which need a value in every epoch, before the first
        # episode's end too.
        mean = rollout.get("rollout/ep_rew_mean", source.partial_return)
        self.log("rollout/ep_rew_mean", mean, prog_bar=True, logger=False, sync_dist=self.trainer.world_size > 1)
        writes = self.logs_this_epoch and not self.is_cut_off
        hook: Any = type(self).on_train_epoch_end
        if self.is_cut_off or (writes and hook.framed is not L.LightningModule.on_train_epoch_end):
            # A cut epoch's point is written at its end, by the run that resumes, and callbacks monitor the means so
            # far. A subclass's hook may read them.
            self._hand_to_callbacks(self.means_so_far())
        if writes:
            # Without an optimizer Lightning has one that has no parameters.
            if self.trainer.optimizers and self.trainer.optimizers[0].param_groups:
                self.record_now(learning_rate=self.trainer.optimizers[0].param_groups[0]["lr"])
            if self.grad_norm is not None:
                self.record_now(grad_norm=float(self.grad_norm))
            self._point = (rollout, source.num_timesteps)

    def _after_on_train_epoch_end(self) -> None:
        if self._point is not None:
            self.write_metrics(*self._point)

    def require_finite_weights(self) -> None:
        """Stops the run before a callback saves weights that are not finite.

        Raises:
            UsageError: names the parameter.
        """
        named = {name: p for name, p in self.named_parameters() if p.is_floating_point()}
        if not named or bool(torch.stack(torch._foreach_norm(list(named.values()))).isfinite().all()):
            return
        bad = next((name for name, p in named.items() if not torch.isfinite(p).all()), None)
        if bad is None:  # the square of a large weight is infinite
            return
        raise UsageError(f"after {self.source.num_timesteps:,} transitions the parameter {bad} is NaN or infinite; "
                         "earlier checkpoints are untouched: lower learning_rate or max_grad_norm")  # fmt: skip

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_evaluation(batch, "eval")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_evaluation(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return batch

    def _log_evaluation(self, batch: dict[str, Tensor], prefix: str) -> None:
        if not is_alone(self.trainer):
            batch = episodes_of_all_ranks(batch, self.device)
        reward, length = batch["return"], batch["length"]
        metrics = {
            f"{prefix}/mean_reward": reward.mean(),
            f"{prefix}/std_reward": reward.std(correction=0),
            f"{prefix}/mean_ep_length": length.float().mean(),
        }
        if "success" in batch:
            metrics[f"{prefix}/success_rate"] = batch["success"].mean()
        self._write_evaluation(metrics, batch_size=len(reward), sync_dist=True)

    def metrics_state(self) -> dict[str, Any]:
        """What is recorded and not written yet, for a checkpoint."""
        norm = None if self.grad_norm is None else float(self.grad_norm)
        return {"sums": self._sums.state_dict(), "latest": dict(self._latest), "grad_norm": norm}

    def load_metrics_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`metrics_state`."""
        self._sums.load_state_dict(state["sums"], self.device)
        self._latest = dict(state["latest"])
        norm = state.get("grad_norm")
        self.grad_norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
