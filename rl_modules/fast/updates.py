"""An update as one function that can be recorded: loss, gradients, clipping, the optimizer's step."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_modules.common.errors import UsageError
from rl_modules.common.modules import tree_leaves, tree_map
from rl_modules.common.schedules import parse_schedule
from rl_modules.core.curves import REDUCTIONS, Means
from rl_modules.core.resume import count_step
from rl_modules.core.state import declared
from rl_modules.fast import is_recording
from rl_modules.fast.graphs import RECORDERS, Recordings
from rl_modules.gradients import GradientHooks

if TYPE_CHECKING:
    from rl_modules.base import ControlModule


#: Numbers that algorithms compare tensors with, so that they may be tensors: a replay then reads their present value.
NUMBERS = ("exploration_rate",)

#: Attributes in which an update leaves tensors for metrics and for prioritised replay.
LEFT = ("grad_norm", "td_error")

#: Reductions of nothing.
EMPTY = {"sum": 0.0, "max": -math.inf, "min": math.inf}


class MeansInPlace(Means):
    """Sums in tensors that stay where they are, to which a replay adds.

    They are double, so that a checkpoint, which reads them, changes no mean by its place; on a CPU, where only a run's
    first call is checked as a recording, the later ones add to them too.
    """

    def __init__(self, before: "MeansInPlace | None" = None) -> None:
        super().__init__()
        # Sums by names, and how often they were added to; others by name and reduction.
        self._totals: dict[tuple[str, ...], Tensor] = {} if before is None else before._totals
        self._extremes: dict[tuple[str, str], Tensor] = {} if before is None else before._extremes

    def add(self, values: Any, weight: Tensor | None = None) -> None:
        device = next((x.device for x in values.values() if isinstance(x, Tensor)), None)
        if device is None or weight is not None or not (is_recording() or device.type == "cpu"):
            super().add(values, weight)
            return
        dtype = torch.float32 if device.type == "mps" else torch.float64  # that has no double
        numbers = [
            x.detach().float().to(dtype).reshape(())
            if isinstance(x, Tensor)
            else torch.full((), float(x), dtype=dtype, device=device)
            for x in [*values.values(), 1.0]
        ]
        names = tuple(values)
        if names not in self._totals:
            self._totals[names] = torch.zeros(len(numbers), dtype=dtype, device=device)
        self._totals[names].add_(torch.stack(numbers))

    def reduce(self, name: str, value: Tensor | float, how: str) -> None:
        if not isinstance(value, Tensor) or not (is_recording() or value.is_cpu):
            super().reduce(name, value, how)
            return
        value = value.detach().float().reshape(())
        if (name, how) not in self._extremes:
            self._extremes[name, how] = torch.full_like(value, EMPTY[how])
        place = self._extremes[name, how]
        place.copy_(REDUCTIONS[how](place, value))

    def _read(self) -> None:
        """Moves the sums to the host."""
        for (name, how), place in self._extremes.items():
            if how == "sum" or place != EMPTY[how]:
                super().reduce(name, place.clone(), how)
            place.fill_(EMPTY[how])
        for names, total in self._totals.items():
            *sums, count = total.tolist()
            for name, value in zip(names, sums, strict=True) if count else ():
                before, times = self._numbers.get(name, (0.0, 0.0))
                self._numbers[name] = before + value, times + count
            total.zero_()

    def begun_anew(self) -> "MeansInPlace":
        self._read()
        return MeansInPlace(self)

    def means(self, trainer: Any = None) -> dict[str, float]:
        self._read()
        return super().means(trainer)

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return super().state_dict()


def prepare_optimizers(optimizers: list[torch.optim.Optimizer], device: torch.device) -> None:
    """Lets optimizers step in a recording: rates and counts become tensors, in saved states they are numbers."""
    dtype = torch.float32 if device.type == "cuda" else torch.float64  # as the kernels read it
    for optimizer in optimizers if device.type in RECORDERS else ():
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
                group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=device)
        optimizer._warned_capturable_if_run_uncaptured = True  # a check runs uncaptured
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device, torch.float32)
        optimizer.register_state_dict_post_hook(_as_usual)


def _as_usual(optimizer: Any, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
        if "capturable" in group:
            group["capturable"] = False


def rates_in_place(optimizers: list[torch.optim.Optimizer], kept: dict[int, Tensor]) -> tuple[float, ...]:
    """Writes scheduled learning rates into the tensors that recordings read; returns those that are numbers."""
    numbers = []
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for i, group in enumerate(groups):
        if isinstance(group["lr"], Tensor):
            kept.setdefault(i, group["lr"])
        elif i in kept:
            group["lr"] = kept[i].fill_(group["lr"])
        else:
            numbers.append(group["lr"])
    return tuple(numbers)


def check_recordable(module: "ControlModule") -> None:
    """Refuses settings whose effect on a recorded update would be that of the first update."""
    what = f"{type(module).__name__}(graph=True)"
    for name, schedule in module.schedules.items():
        if schedule.decays:
            raise UsageError(
                f"{what}: {name}={module.hparams[name]!r} changes with every rollout, and a recording "
                "keeps its first value; give a number, or leave graph out"
            )
    if module.scheduler_factory is not None:
        raise UsageError(
            f"{what}: a recording takes no steps of lr_scheduler; give learning_rate a schedule such as lin_3e-4"
        )
    if module.trainer.world_size > 1:
        raise UsageError(f"{what} trains on one device, the Trainer has {module.trainer.world_size}; leave graph out")
    if module.trainer.precision == "16-mixed":
        raise UsageError(f"{what}: trainer.precision=16-mixed reads the loss's scale back; take bf16-mixed or 32-true")


class Recorded:
    """Base of the steps that replace ``training_step`` under ``graph=True``; they draw from ``generators``."""

    def __init__(self, module: Any, generators: list[torch.Generator]) -> None:
        check_recordable(module)
        self.module, self.trainer = module, module.trainer
        self.optimizers = list(self.trainer.optimizers)
        prepare_optimizers(self.optimizers, module.device)
        what = f"{type(module).__name__}(graph=True)"
        decays = module.learning_rate is not None and parse_schedule(module.learning_rate, "learning_rate").decays
        for optimizer in self.optimizers if decays and module.device.type in RECORDERS else ():
            if not all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
                raise UsageError(
                    f"{what}: a recording keeps the learning rate of {type(optimizer).__name__}, which is "
                    f"no tensor, and learning_rate={module.learning_rate!r} decays; give a number, or "
                    "an optimizer that has capturable"
                )
        self.recordings = Recordings(what, module.device, generators, self.optimizers)
        self._hooks = GradientHooks(self.trainer)
        self._rates: dict[int, Tensor] = {}
        rates_in_place(self.optimizers, self._rates)
        # Of numbers that the run or a subclass may change; the rate of learning is in a tensor.
        names = [*declared(module, kept=True), *(x.attribute for x in module.declared_settings.values())]
        self._names = [name for name in names if name not in (*NUMBERS, "learning_rate")]
        # By key: what a recording has noted by `record_now`, and the tensors that it has left in these attributes.
        self._noted: dict[Any, dict[str, Any]] = {}
        self._left: dict[Any, list[dict[str, Any]]] = {}

    def run(self) -> None:
        """The function that is recorded."""
        raise NotImplementedError

    def step(self, form: Any = ()) -> bool:
        """Runs, records or replays :meth:`run`, of batches of a form; returns whether without its Python code."""
        module = self.module
        numbers = [(name, x) for name in self._names if isinstance(x := getattr(module, name, None), float)]
        frozen = tuple(p.requires_grad for p in module.parameters())
        rates = rates_in_place(self.optimizers, self._rates)
        key = (form, module.recording_key(), *numbers, frozen, rates)
        earlier, module.run.latest = module.run.latest, {}
        try:
            replayed = self.recordings(key, self.run)
            if replayed:
                for owner, left in zip((module, module.run), self._left[key], strict=True):
                    vars(owner).update(left)
            else:
                self._noted[key] = module.run.latest
                owners = (vars(module), vars(module.run))
                self._left[key] = [{name: x[name] for name in LEFT if name in x} for x in owners]
        finally:
            module.run.latest = {**earlier, **self._noted.get(key, {})}
        return replayed

    def update(self, batch: Any, batch_idx: int) -> None:
        """One update from the loss that the algorithm's ``training_step`` returns, as Lightning makes it."""
        module, [optimizer] = self.module, self.optimizers
        with self.trainer.precision_plugin.train_step_context():
            loss = type(module).training_step(module, batch, batch_idx)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"{type(module).__name__}(graph=True): training_step returned {loss!r}, and a recording "
                "takes the gradient of a loss; return that, or leave graph out"
            )
        module.optimizer_zero_grad(self.trainer.current_epoch, batch_idx, optimizer)
        loss.backward()
        self._hooks.after_backward()
        self._hooks.before_optimizer_step(optimizer)
        module.configure_gradient_clipping(optimizer, None, None)
        optimizer.step()


class RecordedUpdate(Recorded):
    """The update of an algorithm that learns from replay, on minibatches that are copied to one place."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, [])
        self._buffers: dict[Any, Any] = {}

    def __call__(self, batch: Any, batch_idx: int) -> None:
        leaves = tree_leaves(batch)
        form = tuple((x.shape, x.dtype) for x in leaves)
        if form not in self._buffers:
            self._buffers[form] = tree_map(torch.clone, batch)
        else:
            torch._foreach_copy_(tree_leaves(self._buffers[form]), leaves)
        self._form, self._index = form, batch_idx
        replayed = self.step(form)
        if not hasattr(self.module, "finish_update"):
            count_step(self.trainer)
        elif replayed:
            self.module.finish_update()

    def run(self) -> None:
        batch = self._buffers[self._form]
        if hasattr(self.module, "finish_update"):  # it steps by itself
            type(self.module).training_step(self.module, batch, self._index)
        else:
            self.update(batch, self._index)
