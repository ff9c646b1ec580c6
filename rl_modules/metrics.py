"""Metrics by name: accumulated on the device, written once per epoch over the transitions axis."""

from collections.abc import Mapping
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch._compile import _disable_dynamo

from rl_modules.common.contract import Experience, ExperienceSource
from rl_modules.common.errors import UsageError
from rl_modules.common.finished_epoch import is_cut_off
from rl_modules.ranks import episodes_of_all_ranks, is_alone


class MetricSums:
    """Sums of named scalars since the last point of the curves.

    ``add`` costs one kernel and never waits for the device. Different calls may bring different names.
    """

    def __init__(self) -> None:
        # Scalars that come together are kept together: one stack per call instead of one sum per name.
        self._rows: dict[tuple[str, ...], list[Tensor]] = {}
        self._numbers: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add one value to each name's sum.

        Raises:
            UsageError: a value is not a scalar.
        """
        if torch.compiler.is_compiling():
            _add_outside_of_graphs(self, values)
        else:
            self._add(values)

    def _add(self, values: Mapping[str, Tensor | float]) -> None:
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                total, count = self._numbers.get(name, (0.0, 0))
                self._numbers[name] = (total + float(value), count + 1)
            elif value.dim() and value.numel() != 1:
                raise UsageError(f"the metric {name} has shape {tuple(value.shape)}; record takes scalars")
            else:
                tensors[name] = value.detach().float().reshape(())
        if tensors:
            self._rows.setdefault(tuple(tensors), []).append(torch.stack(list(tensors.values())))

    def means(self, strategy: Strategy | None = None) -> dict[str, float]:
        """The mean of every name; with a strategy of several ranks, over all of them, which call this together."""
        sums = dict(self._numbers)
        for names, rows in self._rows.items():
            for name, total in zip(names, torch.stack(rows).sum(0).tolist(), strict=True):
                before, count = sums.get(name, (0.0, 0))
                sums[name] = (before + total, count + len(rows))
        if strategy is not None:
            sums = _over_ranks(sums, strategy.root_device)
        return {name: total / count for name, (total, count) in sums.items()}

    def clear(self) -> None:
        """Begin the next point."""
        self._rows.clear()
        self._numbers.clear()

    def state_dict(self) -> dict[str, Any]:
        rows = [{"names": list(names), "values": torch.stack(rows).cpu()} for names, rows in self._rows.items()]
        return {"rows": rows, "numbers": {name: list(sums) for name, sums in self._numbers.items()}}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """The inverse of :meth:`state_dict`; the sums go on ``device``, where the next values come from."""
        self._rows = {tuple(row["names"]): list(row["values"].to(device).unbind(0)) for row in state["rows"]}
        self._numbers = {name: (total, count) for name, (total, count) in state["numbers"].items()}


@_disable_dynamo
def _add_outside_of_graphs(sums: MetricSums, values: Mapping[str, Tensor | float]) -> None:
    """A compiled ``training_step`` calls this between two graphs: a graph would hold for one length of the sums."""
    sums._add(values)


@_disable_dynamo
def _log_outside_of_graphs(module: "MetricsMixin", *arguments: Any) -> None:
    """Lightning looks at signatures and keeps numbers by name, which Dynamo can't follow."""
    module._log_value(*arguments)


def _over_ranks(sums: dict[str, tuple[float, int]], device: torch.device) -> dict[str, tuple[float, int]]:
    """Sums and counts over all ranks. A rank may lack a name that another has."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, list(sums))
    names = list(dict.fromkeys(name for part in everyone for name in part))
    table = torch.tensor([sums.get(name, (0.0, 0)) for name in names], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(table)
    return {name: (total, int(count)) for name, (total, count) in zip(names, table.tolist(), strict=True)}


class MetricsMixin(L.LightningModule):
    """``record``, ``record_now`` and ``log`` of the control algorithms, whose curves are drawn over transitions."""

    experience: Experience

    def __init__(self, log_every: int) -> None:
        super().__init__()
        self.log_every = log_every
        #: Whether this epoch's diagnostics are written. They cost kernels, so others are not computed.
        self.logs_this_epoch = True
        self._sums = MetricSums()
        self._latest: dict[str, float] = {}
        #: Global norm of the last gradient before it was clipped; None where nothing is clipped.
        self.grad_norm: Tensor | None = None

    def record(self, **metrics: Tensor | float) -> None:
        """Add scalars of one minibatch; their mean over the epoch is logged as ``train/<name>``.

        Any number of names, in any subset of the updates. Does nothing in epochs that are not logged, nor in
        evaluations, which call ``act`` too.
        """
        evaluates = self._trainer is not None and self._trainer.evaluating
        if self.logs_this_epoch and not evaluates:
            self._sums.add({f"train/{name}": value for name, value in metrics.items()})

    def record_now(self, **metrics: float) -> None:
        """Set numbers that hold once per epoch, such as a coefficient; the last value is logged."""
        self._latest.update({f"train/{name}": value for name, value in metrics.items()})

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:  # type: ignore[override]
        """Lightning's ``log``. In training the epoch's mean is drawn over ``total_timesteps``, like every curve."""
        if torch.compiler.is_compiling():
            _log_outside_of_graphs(self, name, value, prog_bar, logger, options)
        else:
            self._log_value(name, value, prog_bar, logger, options)

    def _log_value(self, name: str, value: Any, prog_bar: bool, logger: bool | None, options: dict[str, Any]) -> None:
        trainer = self._trainer
        if trainer is not None and trainer.training and options.get("reduce_fx", "mean") == "mean":
            if logger is not False and isinstance(value, Tensor | int | float) and self.logs_this_epoch:
                self._sums.add({name: value})
            logger = False
            options["on_step"], options["on_epoch"] = False, True
        super().log(name, value, prog_bar=prog_bar, logger=logger, **options)

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
    def is_fitting(self) -> bool:
        """Whether a ``fit`` is running."""
        return self._trainer is not None and self._trainer.state.fn == "fit"

    @property
    def is_cut_off(self) -> bool:
        """Whether a run that resumes has batches left in the last epoch; one of all ``total_timesteps`` has none."""
        return is_cut_off(self.trainer) and not self.source.is_complete

    # ---------------------------------------------------------------- curves

    def write_metrics(self, rollout: dict[str, float], step: int) -> None:
        """Write one point of every training curve and begin the next.

        Args:
            rollout: the datamodule's metrics.
            step: transitions so far.
        """
        alone = self.trainer.world_size == 1
        metrics = {**rollout, **self._sums.means(None if alone else self.trainer.strategy), **self._latest}
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self._hand_to_callbacks({name: value for name, value in metrics.items() if not name.startswith("time/")})
        self._sums.clear()
        self._latest = {}

    def _hand_to_callbacks(self, metrics: dict[str, float]) -> None:
        """Make metrics of training known to callbacks that monitor them, such as ``EarlyStopping``."""
        values = torch.tensor(list(metrics.values()), dtype=torch.float32).unbind()
        self.trainer.callback_metrics.update(zip(metrics, values, strict=True))

    def on_validation_start(self) -> None:
        if not self.is_fitting:
            return
        # Lightning draws over this count what a subclass or a callback logs in an evaluation.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.source.num_timesteps
        # An evaluation comes before the epoch's end: its callbacks monitor the means so far, also after a resume.
        self._hand_to_callbacks(self._sums.means(None if is_alone(self.trainer) else self.trainer.strategy))

    def on_train_epoch_start(self) -> None:
        self._see_epoch()

    def _see_epoch(self) -> None:
        self.logs_this_epoch = (self.current_epoch + 1) % self.log_every == 0

    def on_train_epoch_end(self) -> None:
        self.require_finite_weights()
        source = self.source
        # What Lightning and its callbacks log by themselves is drawn over this count: here, over transitions.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = source.num_timesteps
        rollout = source.metrics_over_ranks()
        # For Lightning's bar, EarlyStopping and ModelCheckpoint, which need a value in every epoch, before the first
        # episode's end too.
        mean = rollout.get("rollout/ep_rew_mean", source.partial_return)
        self.log("rollout/ep_rew_mean", mean, prog_bar=True, logger=False, sync_dist=self.trainer.world_size > 1)
        if self.is_cut_off:
            # Its point is written at its end, by the run that resumes; callbacks monitor the means so far.
            self._hand_to_callbacks(self._sums.means(None if is_alone(self.trainer) else self.trainer.strategy))
        elif self.logs_this_epoch:
            if self.trainer.optimizers:
                self.record_now(learning_rate=self.trainer.optimizers[0].param_groups[0]["lr"])
            if self.grad_norm is not None:
                self.record_now(grad_norm=float(self.grad_norm))
            self.write_metrics(rollout, source.num_timesteps)

    def require_finite_weights(self) -> None:
        """Stop before a callback saves weights that are no numbers.

        Raises:
            UsageError: names the parameter.
        """
        named = {name: p for name, p in self.named_parameters() if p.is_floating_point()}
        if not named or bool(torch.stack(torch._foreach_norm(list(named.values()))).isfinite().all()):
            return
        bad = next((name for name, p in named.items() if not torch.isfinite(p).all()), "all together")
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
        self.log_dict(metrics, logger=not self.is_fitting, batch_size=len(reward), sync_dist=True)
        if self.is_fitting:
            for logger in self.trainer.loggers:
                values = {name: value.item() for name, value in metrics.items()}
                logger.log_metrics(values, step=self.source.num_timesteps)

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
